"""The questions that programs ask of our own callables."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class OwnCallable(abc.ABC):
    """Wraps what a user has passed. A subclass is called as programs call it."""

    @abc.abstractmethod
    def _identity(self) -> object:
        """Hashable, and equal for callables that do the same: see `identity`."""

    @abc.abstractmethod
    def _named_like(self) -> Callable[..., object] | str:
        """The callable that errors name, or the name."""

    def _refusal(self, what: str) -> Exception | None:
        """The error for a transformation that the callable has no rule for; `None` is the usual one."""
        del what
        return None

    def _gradients(self) -> tuple[str, Mapping[int, str]] | None:
        """If it computes gradients, what errors call it, and each of its outputs."""
        return None

    def _takes(self, error: Exception, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """True if the callable deals with an error that was noticed after its call, by results that stand for it."""
        del error, outputs, inputs
        return False
