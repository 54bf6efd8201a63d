"""Rules by which `fuse` replaces layers that it does not know, of the caller and of installed packages."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from ..core import PyTree
from ..nn._adopt import adopt
from ._twins import FUSED, PLAIN, title


@dataclasses.dataclass(frozen=True)
class FuseRule:
    """A rule of [`eqxcallback.fuse`][]: which class takes the place of another one, and for which layers of it.

    !!! example

        ```python
        model, report = eqxcallback.fuse(model, rules=[FuseRule(replaces=their.Attention, by=OurAttention)])
        ```

    A package that is installed registers its rules, one or a sequence, as an entry point of the group `eqxcallback.fuse`.

    **Arguments:**

    - `replaces`: a class of Modules. Its subclasses may do something else, and are left alone.
    - `by`: the class in its place. Without `make` it is a subclass of `replaces`, and takes over all fields of a layer.
    - `unless`: a function of a layer, which says why this one is left alone; nothing, or `""`, if it is not.
    - `make`: a function from a layer to a `by` with the very same arrays, in the same order, so that files and the states of
        optimizers fit both. What is in the layer has been replaced already. Of the state of an optimizer it sees a layer whose
        leaves are others, or `None`.
    - `back`: undoes `make`, for [`eqxcallback.unfuse`][].
    """

    replaces: type
    by: type
    _: dataclasses.KW_ONLY
    unless: Callable[[PyTree], str | None] | None = None
    make: Callable[[PyTree], PyTree] | None = None
    back: Callable[[PyTree], PyTree] | None = None

    def __post_init__(self) -> None:
        for name in ("replaces", "by"):
            cls = getattr(self, name)
            if not (isinstance(cls, type) and issubclass(cls, eqx.Module)):
                raise TypeError(f"FuseRule: expected {name} to be a class of Modules; got {cls!r}.")
        for name in ("unless", "make", "back"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(f"FuseRule: expected {name} to be a function or None; got {getattr(self, name)!r}.")
        if self.by in PLAIN or self.by is self.replaces:
            raise ValueError(
                f"FuseRule: expected by to be a class that stands for {title(self.replaces)} alone, so that `unfuse` "
                f"can tell it; got {title(self.by)}. Make a subclass of it."
            )
        if (self.make is None) != (self.back is None):
            raise ValueError(
                f"FuseRule: expected make and back together; got {'make' if self.back is None else 'back'} alone, for "
                f"{title(self.replaces)}. What cannot be undone is a function in a mapping: "
                "`rules={class: function}`."
            )
        if self.make is None and not issubclass(self.by, self.replaces):
            raise ValueError(
                f"FuseRule: expected by to be a subclass of {title(self.replaces)}, whose fields it takes over; got "
                f"{title(self.by)}. Pass functions `make` and `back` for another class."
            )

    def made(self, layer: PyTree) -> PyTree:
        """The layer in its place, checked."""
        new = adopt(self.by, layer) if self.make is None else self.make(layer)
        if type(new) is not self.by:
            raise TypeError(f"expected {title(self.by)}; got {new!r} of type {type(new).__name__}")
        if self.make is not None:
            _check_same(_arrays(layer), _arrays(new), "make")
            _check_same(_arrays(layer), _arrays(self.undone(new)), "back")
        return new

    def undone(self, layer: PyTree) -> PyTree:
        back = adopt(self.replaces, layer) if self.back is None else self.back(layer)
        if type(back) is not self.replaces:
            raise TypeError(f"expected {title(self.replaces)} of back; got {back!r} of type {type(back).__name__}")
        return back


_EXPECTED = "fuse: expected rules to be FuseRules, or a mapping from classes of layers to functions of a layer"

Given = Mapping[type, Callable[[PyTree], PyTree]] | FuseRule | Sequence[FuseRule] | None


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A way to replace a class, and the owner of its rule: nobody for a rule of ours."""

    make: Callable[[PyTree], PyTree]
    whose: str = ""
    rule: FuseRule | None = None

    def __call__(self, layer: PyTree, where: str) -> PyTree:
        """A layer, or in words why this one is left alone."""
        try:
            reason = self.rule.unless(layer) if self.rule is not None and self.rule.unless is not None else None
            if not (reason is None or isinstance(reason, str)):
                raise TypeError(f"expected unless to give a text or None; got {reason!r}")
            return reason or self.make(layer)
        except Exception as error:
            raise ValueError(
                f"fuse: the rule for {title(type(layer))} at {where or '(the model)'} failed ({self.whose}): "
                f"{type(error).__name__}: {error}. Correct it, or leave the layer out with `exclude`."
            ) from error


def replacements(given: Given, packages: Sequence[tuple[str, FuseRule]]) -> dict[type, Replacement]:
    """Rules of the caller go before those of packages, and these before ours."""
    ours = {theirs: Replacement(functools.partial(adopt, ours)) for theirs, ours in FUSED.items()}
    others = {rule.replaces: Replacement(rule.made, whose, rule) for whose, rule in reversed(packages)}
    callers = {rule.replaces: Replacement(rule.made, "in `rules`", rule) for rule in sequence(given)}
    if isinstance(given, Mapping):
        callers = {cls: Replacement(function, "in `rules`") for cls, function in given.items()}
    return {**ours, **others, **callers}


def sequence(given: Any) -> tuple[FuseRule, ...]:
    """The rules that can be undone, of what a user or a package gave as `Given`, all of which is checked."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        for cls, function in given.items():
            if not isinstance(cls, type) or not callable(function):
                raise TypeError(f"{_EXPECTED}; got the entry {cls!r}: {function!r}.")
        return ()
    rules = tuple(given) if isinstance(given, Sequence) else (given,)
    kinds: dict[type, FuseRule] = {}
    for rule in rules:
        if not isinstance(rule, FuseRule):
            raise TypeError(f"{_EXPECTED}; got {rule!r} of type {type(rule).__name__}.")
        for cls in (rule.replaces, rule.by):
            if kinds.setdefault(cls, rule) is not rule:
                raise ValueError(
                    f"fuse: expected one rule for each class; got two with {title(cls)}. Leave one out, or make a subclass."
                )
    return rules


def _arrays(layer: PyTree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(layer) if eqx.is_array_like(leaf) or hasattr(leaf, "dtype")]


def _check_same(want: list[Any], got: list[Any], name: str) -> None:
    if len(want) != len(got) or any(a is not b for a, b in zip(want, got, strict=True)):
        raise ValueError(
            f"expected {name} to give the very same arrays in the same order, {_types(want)}; got {_types(got)}"
        )


def _types(arrays: list[Any]) -> str:
    return f"({', '.join(jax.typeof(x).str_short() if eqx.is_array(x) else repr(x) for x in arrays)})"
