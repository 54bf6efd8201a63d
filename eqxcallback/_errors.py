"""What a failing kernel looks like from outside: one class, the original exception, and where it happened."""

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import ClassVar, NoReturn

from jax.errors import JaxRuntimeError


_logger = logging.getLogger("eqxcallback")
_logger.addHandler(logging.NullHandler())


class KernelError(JaxRuntimeError):
    """A kernel raised an exception. It is chained: `__cause__` and `original` are what the kernel raised.

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


_lock = threading.Lock()


class Failures:
    """Within this context, keeps what kernels raise, in any thread. Otherwise nothing is kept: tracebacks hold arrays."""

    _listening: ClassVar[list["Failures"]] = []

    def __init__(self) -> None:
        self._errors: list[KernelError] = []

    def __enter__(self) -> "Failures":
        with _lock:
            self._listening.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._listening.remove(self)

    @classmethod
    def add(cls, error: KernelError) -> None:
        with _lock:
            for listener in cls._listening:
                listener._errors.append(error)

    def reraise(self, error: Exception) -> NoReturn:
        """Raise the `KernelError` behind the error that XLA made of its text, or that error as it is."""
        # The text of a callback that failed because a callback inside of it did contains that one's text.
        behind = max((f for f in self._errors if str(f) in str(error)), key=lambda f: len(str(f)), default=None)
        if behind is None:
            raise error
        if not isinstance(behind.original, Exception):
            raise behind.original  # KeyboardInterrupt and SystemExit are for the whole program
        raise behind from behind.original


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
            yield
        except KernelError:
            raise
        except Exception as error:
            failures.reraise(error)


def failure_text(error: BaseException, layer: str, name_stack: str, operands: str) -> str:
    # The first frame is the one that XLA entered; what is above it is ours and of no interest.
    frames = "".join(traceback.format_exception(error)).rstrip()
    where = f" in {name_stack}" if name_stack else ""
    return f"{layer}{where} failed; python lane, {operands}\n{frames}"


def record_failure(error: BaseException, layer: str, name_stack: str, operands: str) -> str:
    """Log a kernel's exception once, keep it for whoever listens, and return its text for XLA."""
    text = failure_text(error, layer, name_stack, operands)
    _logger.error("%s", text)
    Failures.add(KernelError(text, layer=layer, name_stack=name_stack, operands=operands, original=error))
    return text


def callable_name(function: Callable[..., object]) -> str:
    """The name under which a user knows a callable."""
    for attribute in ("__qualname__", "__name__"):
        name = getattr(function, attribute, None)
        if isinstance(name, str):
            return name
    for attribute in ("__wrapped__", "func"):  # as functools.wraps and functools.partial have them
        inner = getattr(function, attribute, None)
        if callable(inner):
            return callable_name(inner)
    return type(function).__qualname__
