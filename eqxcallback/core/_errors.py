"""The error of a failing kernel: one class, the original exception, and where it happened."""

import collections
import contextlib
import functools
import itertools
import logging
import pickle
import re
import reprlib
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jax
from jax.errors import JaxRuntimeError

from ._own_callable import OwnCallable
from ._types import ShapeAndDtype, Size


_logger = logging.getLogger("eqxcallback")
_logger.addHandler(logging.NullHandler())


class KernelError(JaxRuntimeError):
    """A kernel raised an exception. `original` is what the kernel raised, and so is `__cause__`, which Python shows, unless JAX
    puts an exception of its own between them, for the call's place: in derivatives and in `jax.checkpoint`, outside of `jit`.

    Raised by eager calls, which wait for their kernel on a CPU, and inside [`eqxcallback.raising`][]. A program under
    `jax.jit` raises JAX's own `JaxRuntimeError` otherwise, of which this is a subclass.

    **Attributes:**

    - `layer`: the name of the layer's class, or of the callback.
    - `name_stack`: the path of transformations and named scopes down to the call, such as `"jit(step)/vmap()"`.
    - `operands`: the types of inputs and outputs as text, such as `"(float32[3,4]) -> float32[3]"`.
    - `original`: the exception itself.
    """

    layer: str
    name_stack: str
    operands: str
    original: BaseException

    def __init__(self, message: str, *, layer: str, name_stack: str, operands: str, original: BaseException):
        super().__init__(message)
        self.layer = layer
        self.name_stack = name_stack
        self.operands = operands
        self.original = original

    def __reduce__(self) -> tuple[Callable[..., "KernelError"], tuple[object, ...], dict[str, list[str]] | None]:
        """Pickle for process pools and test runners. An original that cannot be pickled becomes a `RuntimeError` of its text."""
        original = self.original
        try:
            pickle.loads(pickle.dumps(original))
        except Exception:
            original = RuntimeError("".join(traceback.format_exception_only(original)).strip())
        fields = (type(self), str(self), self.layer, self.name_stack, self.operands, original)
        return _rebuild, fields, {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None


def _rebuild(
    kind: type[KernelError], message: str, layer: str, name_stack: str, operands: str, original: BaseException
) -> KernelError:
    error = kind(message, layer=layer, name_stack=name_stack, operands=operands, original=original)
    error.__cause__ = original
    return error


_lock = threading.Lock()
_numbers = itertools.count(1)

# The first line of a failure's text, by which an error of XLA's is known to be its text. XLA puts its code before it.
FIRST_LINE = re.compile(r"[A-Z_]+: [^\n]* \[failure (\d+)\]")


class Failures:
    """Within this context, keeps what kernels raise, in any thread. Otherwise nothing is kept: tracebacks hold arrays."""

    _listening: ClassVar[list["Failures"]] = []
    _most: ClassVar[int] = 64

    def __init__(self) -> None:
        # By number. The first entry is forgotten first.
        self._errors: collections.OrderedDict[int, KernelError] = collections.OrderedDict()

    def __enter__(self) -> "Failures":
        with _lock:
            self._listening.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._listening.remove(self)
        self._errors.clear()

    @classmethod
    def add(cls, number: int, error: KernelError) -> None:
        forgotten = []  # freed outside of the lock: a traceback holds what may run anything when it goes
        with _lock:
            for listener in cls._listening:
                listener._errors[number] = error
                if len(listener._errors) > cls._most:
                    forgotten.append(listener._errors.popitem(last=False))

    @classmethod
    def _take(cls, listener: "Failures", number: int) -> KernelError | None:
        """The failure that `listener` kept, if it did. All listeners forget it before those that nobody has raised: with many
        threads, one may be slow to ask for its own.
        """
        with _lock:
            for other in cls._listening:
                if number in other._errors:
                    other._errors.move_to_end(number, last=False)
            return listener._errors.get(number)

    def reraise(self, error: Exception) -> NoReturn:
        """Raise the `KernelError` behind the error that XLA made of its text, or that error as it is."""
        match = FIRST_LINE.match(str(error)) if type(error) in (JaxRuntimeError, ValueError) else None
        failure = self._take(self, int(match[1])) if match is not None else None
        try:
            if failure is None:
                raise error
            if not isinstance(failure.original, Exception):
                raise failure.original  # KeyboardInterrupt and SystemExit are for the whole program
            raise failure from failure.original
        finally:
            del error, failure  # or this frame and the exception hold each other


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Inside this context a kernel that fails raises [`eqxcallback.KernelError`][], from the original exception.

    Eager calls do so anyway. For programs under `jax.jit`, JAX knows only a text; this context puts the exception back.
    `KeyboardInterrupt` and `SystemExit` from a kernel propagate as they are.

    !!! example

        ```python
        with eqxcallback.raising():
            jax.block_until_ready(step(x))
        ```

    JAX runs ahead of Python: wait for the results inside the context, or the failure may be raised after it.
    """
    with Failures() as failures:
        try:
            try:
                yield
            except KernelError:
                raise
            except Exception as error:
                failures.reraise(error)
        except BaseException as error:
            for poisoned in _take_poisoned():  # it may be why, and it is not for the next such context
                error.add_note(f"Before that, {str(poisoned).partition(';')[0]}.")
            raise
    raise_poisoned()


def type_text(dtype: object, shape: Sequence[Size]) -> str:
    """Write a type as JAX prints types: `float32[3,4]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def types_text(outputs: Sequence[ShapeAndDtype], inputs: Sequence[ShapeAndDtype]) -> str:
    """Write the types that a kernel is called with: `(float32[3,4]) -> (float32[3])`."""

    def types(buffers: Sequence[ShapeAndDtype]) -> str:
        return ", ".join(type_text(buffer.dtype, buffer.shape) for buffer in buffers)

    return f"({types(inputs)}) -> ({types(outputs)})"


class _Type:
    """A text that stands for an array."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(leaf: Any) -> object:
    return _Type(type_text(leaf.dtype, leaf.shape)) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf


@contextlib.contextmanager
def blaming(who: str, function: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[None]:
    """An error of a function that the user gave says whose function it is. Its class and its text stay the user's own."""
    try:
        yield
    except Exception as error:
        args, kwargs = jax.tree.map(_shown, (tuple(args), dict(kwargs)))
        given = [*map(reprlib.repr, args), *(f"{name}={reprlib.repr(value)}" for name, value in kwargs.items())]
        error.add_note(f"{who}: its {function} failed, called with ({', '.join(given)}).")
        raise


def record_failure(error: BaseException, layer: str, name_stack: str, operands: str) -> str:
    """Log a kernel's exception once, keep it for whoever listens, and return its text for XLA."""
    where = f" in {name_stack}" if name_stack else ""
    traceback_text = "".join(traceback.format_exception(error)).rstrip()

    def text(number: int) -> str:
        return f"{layer}{where} failed; python lane, {operands} [failure {number}]\n{traceback_text}"

    _, failure = keep_failure(text, layer=layer, name_stack=name_stack, operands=operands, original=error)
    return str(failure)


def keep_failure(
    text: Callable[[int], str], kind: type[KernelError] = KernelError, **fields: Any
) -> tuple[int, KernelError]:
    """Log the failure of this text, which has its number, and keep it for whoever listens. Returns both."""
    number = next(_numbers)
    # XLA's texts are UTF-8 and end at a NUL.
    plain = text(number).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    _logger.error("%s", plain)
    error = kind(plain, **fields)
    Failures.add(number, error)
    return number, error


def from_the_user(error: BaseException) -> BaseException:
    """`error`, its traceback without the frames of this package, or of a check of annotations, that stand before the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (__name__.partition(".")[0], "jaxtyping")


_poisoned: list[KernelError] = []


def record_poison(error: BaseException, layer: str, operands: str) -> None:
    """Log a kernel's exception, and keep it for `raise_poisoned`: XLA will not hear of it."""
    error = from_the_user(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    text = f"{layer} failed, and poisoned its results; python lane, {operands}\n{text}"
    _logger.error("%s", text)
    kept = KernelError(text, layer=layer, name_stack="", operands=operands, original=error)
    with _lock:
        if len(_poisoned) < Failures._most:
            _poisoned.append(kept)


def raise_poisoned() -> None:
    """Raise the first error that was kept, and forget the others, which are logged."""
    failures = _take_poisoned()
    if failures:
        raise failures[0] from failures[0].original


def _take_poisoned() -> list[KernelError]:
    with _lock:
        failures = _poisoned[:]
        _poisoned.clear()
    return failures


def callable_name(function: Callable[..., object] | OwnCallable) -> str:
    """The name under which a user knows a callable."""
    for attribute in ("__qualname__", "__name__"):
        name = getattr(function, attribute, None)
        if isinstance(name, str):
            return name
    if isinstance(function, functools.partial):
        return callable_name(function.func)
    named = function._named_like() if isinstance(function, OwnCallable) else type(function).__qualname__
    return named if isinstance(named, str) else callable_name(named)
