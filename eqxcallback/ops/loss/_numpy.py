"""Cross-entropy of a softmax, of logits or of a linear layer's, of which there is a chunk at a time."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from ...core import PyTree
from ...kernel import PythonKernel
from .._numpy import XpArray, finite, on_arrays, store, wide


_CHUNK = 1024  # classes


@on_arrays
def softmax_cross_entropy(xp: ModuleType, out: XpArray, logits: XpArray, labels: XpArray, **options: Any) -> None:
    _loss(xp, out, [(0, wide(logits))], labels, logits.shape[-1], **options)


@on_arrays
def linear_cross_entropy(
    xp: ModuleType,
    results: PyTree,
    x: XpArray,
    weight: XpArray,
    labels: XpArray,
    bias: XpArray | None = None,
    class_weights: XpArray | None = None,
    *,
    soft_cap: float | None = None,
    **options: Any,
) -> None:
    x, size = wide(x), weight.shape[0]

    def chunks() -> Iterable[tuple[int, XpArray]]:
        for first in range(0, size, _CHUNK):
            here = slice(first, first + _CHUNK)
            z = x @ wide(weight[here]).T
            z = z if bias is None else z + bias[here]
            yield first, z if soft_cap is None else soft_cap * xp.tanh(z / soft_cap)

    out, *sums = results
    for result, value in zip(sums, _loss(xp, out, chunks(), labels, size, class_weights, **options), strict=True):
        store(result, value)


def _loss(
    xp: ModuleType,
    out: XpArray,
    chunks: Iterable[tuple[int, XpArray]],
    labels: XpArray,
    size: int,
    class_weights: XpArray | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> tuple[XpArray, XpArray]:
    """The loss of logits that come in chunks, each as its first class and its logits. Returns what the softmax is made of: the
    highest logit, or 0 for none, and the sum of the exponentials of what they are below it.
    """
    index = xp.where(labels < 0, labels + size, labels)
    highest = xp.full(labels.shape, -np.inf, out.dtype)
    total, chosen, every = (xp.zeros(labels.shape, out.dtype) for _ in range(3))
    for first, z in chunks if size else ():
        higher = xp.maximum(highest, z.max(axis=-1))
        shift = finite(higher, xp)
        total = total * xp.exp(highest - shift) + xp.exp(z - shift[..., None]).sum(axis=-1)
        highest = higher
        weighted = z if class_weights is None else z * class_weights[first : first + z.shape[-1]]
        every = every + weighted.sum(axis=-1)
        there = index - first
        picked = xp.take_along_axis(z, xp.clip(there, 0, z.shape[-1] - 1)[..., None], axis=-1)[..., 0]
        chosen = xp.where((there >= 0) & (there < z.shape[-1]), picked, chosen)
    shift, log_total = finite(highest, xp), xp.log(total)
    loss, weights = log_total - (chosen - shift), 1.0
    if class_weights is not None and size:
        loss, weights = loss * class_weights[xp.clip(index, 0, size - 1)], class_weights.mean()
    if label_smoothing:
        mean = every / max(size, 1) - weights * shift
        loss = (1 - label_smoothing) * loss + label_smoothing * (weights * log_total - mean)
    loss = xp.where((index >= 0) & (index < size), loss + z_loss * (log_total + shift) ** 2 if z_loss else loss, np.nan)
    store(out, loss if ignore_index is None else xp.where(labels == ignore_index, 0.0, loss))
    return shift, total


CROSS_ENTROPY = PythonKernel(softmax_cross_entropy, only_if_chosen=True)
LINEAR_CROSS_ENTROPY = PythonKernel(linear_cross_entropy, only_if_chosen=True)
