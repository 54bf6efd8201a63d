"""Which of an op's kernels run."""

import dataclasses
import functools
from typing import Any, Literal, get_args

from ..kernel import Kernel


Implementation = Literal["auto", "reference", "native", "python", "cuda", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


@functools.lru_cache(maxsize=4096)
def chosen(op: Any, implementation: str) -> Any:
    """`op` with its kernels of one backend alone, or with none."""
    if implementation == "auto":
        return op
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op.name}: expected implementation to be one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}."
        )
    if implementation == "reference":
        if op.reference is None:
            raise ValueError(f'{op.name}: there is no reference; implementation="reference" needs one.')
        return dataclasses.replace(op, kernels={}, alternatives={}, backward=None, when=None)
    kernels = {
        platform: kernel
        for platform in (*op.kernels, *op.alternatives)
        for kernel in reversed(kernels_for(op, platform))
        if kernel.backend == implementation
    }
    if not kernels:
        raise ValueError(
            f"{op.name}: expected implementation to be one that there is a kernel of: {available(op)}; got {implementation!r}."
        )
    backward = op.backward
    if not isinstance(backward, Kernel) and backward is not None:
        backward = {platform: kernel for platform, kernel in backward.items() if platform in kernels} or None
    return dataclasses.replace(op, kernels=kernels, alternatives={}, backward=backward, falls_back=False, when=None)


def kernels_for(op: Any, platform: str) -> tuple[Kernel, ...]:
    """The default one first."""
    return (*([op.kernels[platform]] if platform in op.kernels else []), *op.alternatives.get(platform, ()))


def available(op: Any) -> str:
    """For errors: the backends, each with its platforms."""
    found: dict[str, list[str]] = {}
    for platform in dict.fromkeys((*op.kernels, *op.alternatives)):
        for kernel in kernels_for(op, platform):
            found.setdefault(kernel.backend, []).append(platform)
    texts = [f"{backend} ({', '.join(dict.fromkeys(platforms))})" for backend, platforms in found.items()]
    return ", ".join(["auto", *(["reference"] if op.reference is not None else []), *texts])
