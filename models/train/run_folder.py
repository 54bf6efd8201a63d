"""The folder of a training: its options, the loss of each step, and a lock. Snapshots are in it too, and the tokens of a text."""

import contextlib
import dataclasses
import json
import os
import pathlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from .._errors import ModelFileError
from .._locking import expect_own, locked
from .._replacing import replace_file
from .options import RunOptions, problem_of


_OPTIONS, _LOSSES = "options.json", "losses.jsonl"
# The text in the lock of a run. It tells the folder of a run that was killed before it had begun from that of another program.
_MARK = b"python -m models.train\n"


class RunFolder:
    """A run. It has begun when its options are there, which are written last."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the end of this one lets them in, whatever its end is.

        **Raises:**

        - `ModelFileError` if another process is in, or the folder cannot be written.
        """
        with locked(self.path, _MARK):
            yield

    def expect_new(self) -> None:
        """Raise `ModelFileError` if a run has begun, or snapshots of one are here, or files of other programs."""
        has_begun = os.path.exists(self.path / _OPTIONS)
        if not has_begun:  # the locks of old runs have no mark
            expect_own(self.path, _MARK, "--out")
        if has_begun or any(self.path.glob("*.snapshot")):
            raise ModelFileError(
                f"expected a folder without a run; got {self.path}. "
                f"Go on with `python -m models.train resume {self.path}`, or pass another --out."
            )

    def begin(self, options: RunOptions) -> None:
        """Write the options of a new run. Losses of a run whose options were removed go too."""
        self.truncate_losses(0)
        self._replace(_OPTIONS, json.dumps(dataclasses.asdict(options), indent=2).encode() + b"\n")

    def options(self) -> RunOptions:
        """Return the options. Raises `ModelFileError` if no run has begun, or they cannot be read."""
        path = self.path / _OPTIONS
        try:
            options = RunOptions(**json.loads(path.read_bytes()))
            for name, kind in typing.get_type_hints(RunOptions).items():
                if not isinstance(getattr(options, name), kind):
                    raise TypeError(f"{name} {getattr(options, name)!r}")
        except FileNotFoundError:
            raise ModelFileError(f"expected the folder of a run, with {_OPTIONS}; got {self.path}") from None
        except (OSError, TypeError, ValueError) as error:
            raise ModelFileError(f"expected the options of a run in {path}; got {error}") from None
        problem = problem_of(options)
        if problem is not None:
            raise ModelFileError(
                f"expected {problem.name} {problem.expected} in {path}; got {problem.got}. Put the run's options back."
            )
        return options

    def records(self) -> list[dict[str, Any]]:
        """Return what `append` wrote, a record for each step."""
        path = self.path / _LOSSES
        try:
            return [json.loads(line) for line in path.read_bytes().splitlines()]
        except (OSError, ValueError) as error:
            raise ModelFileError(f"expected the losses of a run in {path}; got {error}") from None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record of a step, so that it outlives the process."""
        with (self.path / _LOSSES).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def truncate_losses(self, steps: int) -> None:
        """Keep the records of the first steps. The last record may be half of one, if the process was killed.

        **Raises:**

        - `ModelFileError` if there are fewer.
        """
        path = self.path / _LOSSES
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if len(lines) < steps:
            raise ModelFileError(f"expected {steps} steps in {path}, as the snapshot has; got {len(lines)}")
        self._replace(_LOSSES, b"".join(lines[:steps]))

    def sync_losses(self) -> None:
        """Put the records on the disk, before a snapshot that counts on them."""
        with (self.path / _LOSSES).open("rb") as file:
            os.fsync(file.fileno())

    def _replace(self, name: str, data: bytes) -> None:
        replace_file(self.path / name, lambda partial: partial.write_bytes(data))
