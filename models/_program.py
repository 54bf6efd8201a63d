"""Manners of the programs: errors are one line and exit code 2, progress goes to stderr, results to stdout."""

import argparse
import contextlib
import io
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

from ._errors import ModelFileError


# The choices of `--dtype`, and of `--cache`.
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
CACHE_DTYPES = {**DTYPES, "f16": "float16", "int8": "int8"}
# What takes so many seconds has a bar, which is drawn as often.
_DELAY = 1.0

_T = TypeVar("_T")


class UsageError(Exception):
    """A user's wish that cannot be met. The message is one line."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, where argparse prints the usage as well."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_weights(group: argparse._ArgumentGroup) -> None:
    """Add the option of programs with a language model; `models.model_files.open_files` takes its value."""
    group.add_argument(
        "--weights",
        type=pathlib.Path,
        metavar="PATH",
        help="a GGUF file, or a folder with safetensors files (default: SmolLM2-135M-Instruct)",
    )


def add_rounding(group: argparse._ArgumentGroup) -> None:
    """Add the options of programs with a language model that say in how many bits it computes; see `rounding_of`."""
    group.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="f32",
        help="of activations and of weights that are not quantised (default: %(default)s)",
    )
    group.add_argument("--cache", choices=list(CACHE_DTYPES), help="how keys and values are kept (default: as --dtype)")
    group.add_argument(
        "--activations",
        choices=["exact", "int8"],
        default="exact",
        help="int8 rounds what quantised layers of blocks multiply, which is faster (default: %(default)s)",
    )


def rounding_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `models.llama.load` takes of them."""
    return {
        "dtype": DTYPES[options.dtype],
        "cache_dtype": None if options.cache is None else CACHE_DTYPES[options.cache],
        "activations": options.activations,
    }


def run(
    name: str,
    program: Callable[[list[str] | None], None],
    arguments: list[str] | None,
    *,
    remedy: str = "Use a machine with more.",
) -> int:
    """Run a program and say what went wrong.

    **Arguments:**

    - `name`: of the program, which errors begin with.
    - `program`: a function of its arguments.
    - `arguments`: by default those of the process.
    - `remedy`: what makes the program take less memory, for when there is too little.

    **Returns:** the exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters
    try:
        program(arguments)
    except (UsageError, ModelFileError) as error:
        return _fail(name, str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads any more
        return 0
    except OSError as error:
        return _fail(name, f"a file cannot be read or written: {error}")
    except (MemoryError, RuntimeError) as error:
        # JAX's error is a RuntimeError with the name of XLA's in its text.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        got = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        return _fail(name, f"expected enough memory; got {got}. {remedy}")
    return 0


def write(lines: Iterable[str]) -> None:
    """Write results to stdout, at once, and beside a progress bar.

    **Raises:** `UsageError` if that is not possible, or `BrokenPipeError` if nobody reads any more.
    """
    if sys.stdout is None:
        raise UsageError("expected stdout, for the results; it is closed")
    try:
        with _Bar.external_write_mode(file=sys.stdout):
            sys.stdout.writelines(lines)
            sys.stdout.flush()
    except OSError as error:
        # What Python still holds back would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"the results cannot be written: {error}") from None


def report(text: str) -> None:
    """A line on stderr, beside a progress bar."""
    if sys.stderr is not None:  # else it is closed, and `print` would take stdout
        with _Bar.external_write_mode(file=sys.stderr):
            print(text, file=sys.stderr)


def progress(items: Iterable[_T], *, desc: str, unit: str, total: int | None = None, initial: int = 0) -> Iterable[_T]:
    """Show a bar on stderr, once the iteration has taken a second, its first item included. `total` is its length, for items that
    have none, and `initial` how much was done before."""
    if sys.stderr is None:
        return items
    options: dict[str, Any] = {
        "desc": desc,
        "unit": unit,
        "total": total,
        "initial": initial,
        "delay": _DELAY,
        "leave": False,
        "file": sys.stderr,
    }
    return _Bar(items, **options)


def annotate(bar: Iterable[Any], **figures: str) -> None:
    """Show figures beside a bar of `progress`, the next time that it moves."""
    if isinstance(bar, tqdm):
        bar.set_postfix(figures, refresh=False)


class _Bar(tqdm):
    """A bar that is drawn while an item lasts, too. tqdm alone draws it when an item has ended."""

    monitor_interval = 0  # so tqdm starts no thread, which would not draw it either

    def __iter__(self) -> Iterator[Any]:
        if self.disable:  # by TQDM_DISABLE
            yield from self.iterable
            return
        ended = threading.Event()
        timer = threading.Thread(target=self._draw_until, args=(ended,), daemon=True)
        timer.start()
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            ended.set()
            timer.join()
            self.close()

    def refresh(self, *_: Any, **__: Any) -> None:
        """Draw the bar, unless it is too early. The lock is released if that fails, which tqdm does not see to."""
        with self.get_lock():
            if time.time() >= self.start_t + _DELAY:
                self.delay = 0.0  # so `close` clears it
                super().refresh(nolock=True)

    def _draw_until(self, ended: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            while not ended.wait(_DELAY):
                self.refresh()


def _fail(name: str, message: str) -> int:
    report(f"{name}: error: {' '.join(message.splitlines())}")
    return 2
