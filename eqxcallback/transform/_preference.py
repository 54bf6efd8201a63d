"""The fastest of several kernels of a platform, by past measurements.

A contest is a call that several kernels take. Its winner is kept on disk, for the device, the kernels and the types of the call.
Where nobody has measured, the kernels keep the order that they are declared in.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import backends, xla


@dataclasses.dataclass(frozen=True)
class Contest:
    """**Attributes:**

    - `op`: the name of the op or layer.
    - `call`: the types and options that its kernels are asked with, as a text.
    - `device`: a text for the device, and for all that are like it.
    - `kernels`: a text for each kernel: another one for a kernel that does something else.
    """

    op: str
    call: str
    device: str
    kernels: tuple[str, ...]
    bound: tuple[backends.BoundKernel, ...] = dataclasses.field(compare=False, repr=False)

    @property
    def file(self) -> str:
        return f"{_folder(self.op)}/{backends.key_of((self.op, self.call, self.device, self.kernels))}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """While programs are lowered to be measured: the winners that are tried, and all contests that were met. A winner of `None`
    stands for the reference.
    """

    winners: Mapping[Contest, int | None]
    met: dict[Contest, int | None]
    version: int


_trial: contextvars.ContextVar[Trial | None] = contextvars.ContextVar("trial", default=None)
_versions = itertools.count(1)
_version = 0
# For each file the winner, `None` for none: a program with a hundred calls asks a hundred times.
_known: dict[tuple[str, str], int | None] = {}
# The folders and ops for which this process has measured.
_measured: set[tuple[str, str]] = set()


def version() -> int:
    """Another number whenever other kernels may win."""
    trial = _trial.get()
    return _version if trial is None else trial.version


@contextlib.contextmanager
def trial(winners: Mapping[Contest, int | None]) -> Iterator[Mapping[Contest, int | None]]:
    """Programs that are lowered inside take these kernels. What it gives has, afterwards, every contest and its winner."""
    new_trial = Trial(winners, {}, next(_versions))
    token = _trial.set(new_trial)
    try:
        yield new_trial.met
    finally:
        _trial.reset(token)


def may_be_measured(op: str) -> bool:
    """True if somebody has measured, or is about to: that costs less to ask than what the kernels are made of."""
    folder = backends.cache_folder()
    # What was measured in this process holds in it, also where nothing can be written.
    return _trial.get() is not None or (str(folder), op) in _measured or (folder / _folder(op)).is_dir()


def winner(
    op: str, platform: str, bound: Sequence[backends.BoundKernel], call: Callable[[], Any], who: str
) -> int | None:
    """The number of the kernel that runs, or `None` for the reference. `call`: the types and options."""
    current, device = _trial.get(), _device(platform)
    if device is None:
        return 0
    text = re.sub(" at 0x[0-9a-f]+", "", repr(call()))
    contest = Contest(
        op, text, device, tuple(backends.description(candidate.kernel, who) for candidate in bound), tuple(bound)
    )
    if current is None:
        return _stored(contest)
    chosen = current.met[contest] = current.winners[contest] if contest in current.winners else _stored(contest)
    return chosen


def store(contest: Contest, chosen: int, about: Mapping[str, object]) -> None:
    """Keep the winner, for programs that are lowered from now on, in other processes too."""
    global _version
    backends.store(contest.file, {**about, "winner": chosen}, b"")
    _known[_place(contest)] = chosen
    _measured.add((str(backends.cache_folder()), contest.op))
    _version = next(_versions)


def _stored(contest: Contest) -> int:
    place = _place(contest)
    if place not in _known:
        about = backends.load(contest.file)
        number = None if about is None else about[0].get("winner")
        _known[place] = number if isinstance(number, int) and 0 <= number < len(contest.kernels) else None
    return _known[place] or 0


def _place(contest: Contest) -> tuple[str, str]:
    return str(backends.cache_folder()), contest.file


def _folder(op: str) -> str:
    return f"tuned/{re.sub('[^A-Za-z0-9_.-]', '_', op)}"


def _device(platform: str) -> str | None:
    """`None` where programs are lowered for a device that is not here."""
    if platform == "cuda" and os.environ.get("EQXCALLBACK_CUDA_ARCH"):
        return None
    return xla.device_text(platform)
