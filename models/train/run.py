"""A run from its last snapshot to its end, or to Ctrl-C."""

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .. import snapshots
from .._errors import ModelFileError
from .._program import DTYPES, UsageError, annotate, progress, report, write
from .._stopping import stopping
from ..parallel import processes
from .report import key, plot, table
from .run_folder import RunFolder
from .tasks import FUSED, PLAIN, Task, make_task
from .trainer import Memory, State, Trainer, make_optimizer


_CONTESTANTS = {"fused": (FUSED,), "plain": (PLAIN,), "both": (FUSED, PLAIN)}


class Training:
    """The models of a run and where they are. With two, both get the same batches.

    **Arguments:**

    - `run`: the folder. Several processes read it, and process 0 alone writes it and speaks.
    - `mesh`: of `models.parallel.processes.joined`, for several devices.
    """

    def __init__(self, run: RunFolder, mesh: jax.sharding.Mesh | None = None):
        self.run, self.options, self._mesh = run, run.options(), mesh
        self._speaks = mesh is None or jax.process_index() == 0
        self.contestants = _CONTESTANTS[self.options.contestants]
        self.task: Task = make_task(self.options, run.path)
        optimizer = make_optimizer(rate=self.options.rate, steps=self.options.steps)
        dtype = jnp.dtype(DTYPES[self.options.dtype])
        self._trainers = {
            which: Trainer(
                self.task.model(which),
                self.task.losses[which],
                optimizer,
                dtype=dtype,
                mesh=mesh,
                accumulate=self.options.accumulate,
            )
            for which in self.contestants
        }
        self._memory: dict[str, Memory | None] = {}
        self.step = 0
        """The number of steps behind the states."""
        self.states: dict[str, State] = {}

    def restore(self) -> None:
        """Take the last snapshot, or begin.

        **Raises:** `ModelFileError` if no snapshot can be used, or other processes took another one.
        """
        like = {which: trainer.structure for which, trainer in self._trainers.items()}
        last = snapshots.load_last(self.run.path, like, dataclasses.asdict(self.options), self._report, self._progress)
        if last is not None:
            self.step, states = last
        else:
            states = {which: trainer.begin(self.task.model(which)) for which, trainer in self._trainers.items()}
        if self._mesh is not None and processes.total(self._mesh, self.step) != self.step * jax.process_count():
            raise ModelFileError(
                f"expected the same last snapshot in {self.run.path} for all processes; this one sees that of step "
                f"{self.step}. Use a folder that all of them share."
            )
        self.states = {which: trainer.place(states[which]) for which, trainer in self._trainers.items()}

    def model(self) -> Any:
        """Return the first model as it is now."""
        return self._model(copy=True)

    def train(self) -> None:
        """Go on to the last step.

        **Raises:**

        - `UsageError` if a loss, a gradient or the held-out loss is not finite. The weights of that step are not saved.
        - `KeyboardInterrupt` after Ctrl-C or SIGTERM, when a snapshot is written.
        """
        if self._speaks:
            self.run.truncate_losses(self.step)
        self._report(self._describe())
        first, steps = self.step, self.options.steps
        batch = self.task.data.batch(first)
        for which, trainer in self._progress(self._trainers.items(), desc="compiling", unit="model"):
            self._memory[which] = trainer.compile(batch)
        with stopping() as stop:
            bar = self._progress(range(first, steps), desc="training", unit="step", total=steps, initial=first)
            for step in bar:
                record = self._advance(step)
                annotate(bar, loss=f"{record['loss']:.3f}")
                is_regular = self.step % self.options.save_every == 0 or self.step == steps
                if is_regular:
                    record |= self._evaluate()
                if self._speaks:
                    self.run.append(record)
                is_last = self._in_any_process(stop.is_set)  # read once: it may be set at any moment
                if is_last and not is_regular:
                    self._evaluate()  # no weights that are broken are saved
                if self._speaks and (is_regular or is_last):
                    self._save()
                if is_regular:
                    self._write([_line(record, steps)])
                if is_last:
                    break
        if self._speaks and self.step == steps:
            self._summarize()
        self._in_any_process(False)  # a wait, until process 0 has written all
        if self.step < steps:
            self._report(f"stopped after step {self.step}; `python -m models.train resume {self.run.path}` goes on")
            raise KeyboardInterrupt

    def _model(self, *, copy: bool) -> Any:
        which = self.contestants[0]
        return self._trainers[which].model(self.states[which], copy=copy)

    def _evaluate(self) -> dict[str, float]:
        """Return the scores of what is held out. The loss of a step is that before it, so this one says if the step was good."""
        scores = self.task.evaluate(self.contestants[0], self._model(copy=False))
        _expect_finite(scores["held_out"], f"the held-out loss after step {self.step}")
        return scores

    def _in_any_process(self, is_set: bool) -> bool:
        """Return true if this is so in one of the processes, after a wait for all."""
        return is_set if self._mesh is None else processes.total(self._mesh, int(is_set)) > 0

    def _save(self) -> None:
        self.run.sync_losses()
        snapshots.save(self.run.path, self.step, self.states, dataclasses.asdict(self.options))

    def _summarize(self) -> None:
        records = self.run.records()
        write([table(self.contestants, records, self._memory, self.task)])
        problem = plot(self.contestants, records, self.run.path)
        if problem is not None:
            report(problem)

    def _report(self, text: str) -> None:
        if self._speaks:
            report(text)

    def _write(self, lines: Iterable[str]) -> None:
        if self._speaks:
            write(lines)

    def _progress(self, items: Iterable[Any], **options: Any) -> Iterable[Any]:
        return progress(items, **options) if self._speaks else items

    def _advance(self, step: int) -> dict[str, Any]:
        """Take one step with all models, in turns the one or the other first."""
        batch, record = self.task.data.batch(step), {"step": step + 1}
        for which in self.contestants[:: -1 if step % 2 else 1]:
            start = time.perf_counter()
            self.states[which], loss = self._trainers[which].step(self.states[which], batch)
            seconds = time.perf_counter() - start
            _expect_finite(loss, f"the loss of step {step + 1}")
            record |= {key(self.contestants, which, "loss"): loss, key(self.contestants, which, "seconds"): seconds}
        self.step = step + 1
        return record

    def _describe(self) -> str:
        weights = self.states[self.contestants[0]].weights
        size = sum(leaf.size for leaf in jax.tree.leaves(weights))
        kind = f"{self.options.model}: {size:,} weights in {self.options.dtype}"
        if self.options.devices > 1:
            kind += f" on each of {self.options.devices} devices"
        return f"{kind}, step {self.step} of {self.options.steps}; compiling"


def _expect_finite(loss: float, name: str) -> None:
    if not math.isfinite(loss):
        raise UsageError(f"{name} is {loss}. Begin anew with a lower --rate than this run's.")


def _line(record: dict[str, Any], total: int) -> str:
    scores = "".join(
        f", {name.replace('_', ' ')} {record[name]:.4f}" for name in ("held_out", "accuracy") if name in record
    )
    return f"step {record['step']} of {total}: loss {record['loss']:.4f}{scores}\n"
