"""The steps of a fine-tuning, from its last snapshot on if there are any."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _program, snapshots
from .._program import UsageError
from .._stopping import stopping
from .examples import Batch
from .tuner import Tuner


class Record(NamedTuple):
    """The measurements up to a step, in f64: part of a snapshot.

    **Attributes:**

    - `before`: the perplexity of what is held out, before the first step.
    - `sums`, `counts`: of each epoch, of the losses of its targets, and of the targets.
    - `seconds`: of the steps, without the time to compile.
    """

    before: np.ndarray
    sums: np.ndarray
    counts: np.ndarray
    seconds: np.ndarray


class Training:
    """A fine-tuning, and where it is.

    **Arguments:**

    - `epochs`: the batches of each.
    - `folder`: of the snapshots, which this process has locked, or None for none.
    - `save_every`: the number of steps between two snapshots.
    - `options`: which a run must have to go on from a snapshot.
    """

    def __init__(
        self,
        tuner: Tuner,
        epochs: Sequence[Sequence[Batch]],
        *,
        folder: pathlib.Path | None = None,
        save_every: int = 1,
        options: Mapping[str, Any] | None = None,
    ):
        self._tuner, self._folder, self._save_every = tuner, folder, save_every
        self._batches = [(epoch, batch) for epoch, of_epoch in enumerate(epochs) for batch in of_epoch]
        self._options: dict[str, Any] = {}
        if folder is not None:
            sums = {"lines_checksum": snapshots.checksum(self._batches), "model_checksum": tuner.checksum()}
            self._options = {**(options or {}), **sums}
        zeros = np.zeros(len(epochs))
        self.record = Record(np.zeros(()), zeros, zeros.copy(), np.zeros(()))
        self.step = 0
        """The number of steps that were taken."""

    def begin(self, perplexity: Callable[[], float]) -> None:
        """Take the last snapshot, or measure the perplexity before the first step.

        **Raises:** `ModelFileError` if there are snapshots and none can be used.
        """
        if self._folder is not None:
            like = jax.tree.map(_structure, (self._tuner.state, self.record))
            last = snapshots.load_last(self._folder, like, self._options, _program.report, _program.progress)
            if last is not None:
                self.step, (self._tuner.state, self.record) = last
                _program.report(f"step {self.step} of {len(self._batches)}, of the snapshot in {self._folder}")
                return
        self.record = self.record._replace(before=np.asarray(perplexity(), np.float64))

    def train(self) -> None:
        """Take the steps that are left.

        **Raises:**

        - `UsageError` if a loss, a gradient or an adapter is not finite. The adapters of that step are not saved.
        - `KeyboardInterrupt` after Ctrl-C or SIGTERM: with a folder, when a snapshot is written.
        """
        with contextlib.nullcontext() if self._folder is None else stopping() as stop:
            left = self._batches[self.step :]
            shown: dict[str, Any] = {"desc": "training", "unit": "step", "initial": self.step}
            for epoch, batch in _program.progress(left, total=len(self._batches), **shown):
                self._advance(epoch, batch)
                is_last = stop is not None and stop.is_set  # read once: it may be set at any moment
                if self.step % self._save_every == 0 or self.step == len(self._batches) or is_last:
                    self._save()
                if is_last:
                    _program.report(f"stopped after step {self.step}; the same command goes on")
                    raise KeyboardInterrupt

    def _advance(self, epoch: int, batch: Batch) -> None:
        self._tuner.program(batch)
        start = time.perf_counter()
        loss = self._tuner.step(batch)
        self.record.seconds[...] += time.perf_counter() - start
        expect_finite(loss, f"loss in epoch {epoch + 1}")
        count = (batch.targets >= 0).sum()
        self.record.sums[epoch] += loss * count
        self.record.counts[epoch] += count
        self.step += 1

    def _save(self) -> None:
        if self._folder is not None:
            expect_finite_adapters(self._tuner)
            snapshots.save(self._folder, self.step, (self._tuner.state, self.record), self._options)


def expect_finite(number: float, name: str) -> None:
    if not math.isfinite(number):
        raise UsageError(f"expected a finite {name}; got {number}. Pass a lower --learning-rate.")


def expect_finite_adapters(tuner: Tuner) -> None:
    if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tuner.adapters)):
        raise UsageError("expected an adapter of finite numbers; got others. Pass a lower --learning-rate.")


def _structure(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
