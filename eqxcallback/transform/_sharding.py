"""The rule by which an op may be split between devices, as users write it."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .. import xla
from ..core import Aval, Size


class _Dim(NamedTuple):
    """A dimension in a rule. `None` is whole. `in_groups`: each of `name` is several elements, which stay together."""

    name: str | None
    in_groups: bool = False


_WHOLE = _Dim(None)


def parse_sharding(
    rule: str, slots: Sequence[int | None], operands: Sequence[Aval], results: Sequence[Aval], who: str
) -> xla.Factors:
    """The factors of `"... d, d -> ... d"`: for each flat operand and result, the names of its dimensions.

    A name may be split between devices if all results have it, and an operand: then each device calls the kernel on its own
    part. `_` is a dimension that is whole, `(d _)` one of several elements for each of `d`, and `...` stands for leading
    dimensions, aligned at their right end. A dimension of the length 1 whose name has another length elsewhere is shared, and
    so whole.

    **Arguments:** `operands` and `results` are types. `slots` has `None` for an operand that is absent, of which the rule
    may have a term all the same.

    **Raises:** `ValueError` if the rule does not fit.
    """
    sides = rule.split("->")
    lists = [[] if not side.strip() else side.split(",") for side in sides]
    if len(lists[0]) == len(slots):
        lists[0] = [term for term, slot in zip(lists[0], slots, strict=True) if slot is not None]
    counts = (len(operands), len(results))
    if len(sides) != 2 or tuple(map(len, lists)) != counts:
        raise ValueError(
            f"{who}: expected sharding to be a rule with {counts[0]} operands and {counts[1]} results, such as "
            f"'... d, d -> ... d'; got {rule!r}."
        )
    named = [
        [_dims(_WORD.findall(text), len(aval.shape), rule, who) for text, aval in zip(side, avals, strict=True)]
        for side, avals in zip(lists, (operands, results), strict=True)
    ]
    sizes = _sizes([*named[0], *named[1]], [*operands, *results], rule, who)

    def split(dims: Sequence[_Dim], aval: Aval) -> xla.Dims:
        """Leave the names whose dimension is shared out."""
        return tuple(
            name if name in sizes and size != 1 else None for (name, _), size in zip(dims, aval.shape, strict=True)
        )

    of_operands, of_results = (
        [split(dims, aval) for dims, aval in zip(side, avals, strict=True)]
        for side, avals in zip(named, (operands, results), strict=True)
    )
    # What no operand has, a kernel makes whole.
    everywhere = set.intersection(*map(set, of_results)) & set().union(*of_operands) if of_results else set()

    def kept(dims: xla.Dims) -> xla.Dims:
        return tuple(name if name in everywhere else None for name in dims)

    return xla.Factors(tuple(map(kept, of_operands)), tuple(map(kept, of_results)))


def _sizes(named: Sequence[Sequence[_Dim]], avals: Sequence[Aval], rule: str, who: str) -> dict[str, Size]:
    """The size of each name, but for those that have the length 1 only."""
    every = [
        (dim, size)
        for dims, aval in zip(named, avals, strict=True)
        for dim, size in zip(dims, aval.shape, strict=True)
        if dim.name is not None and size != 1
    ]
    sizes: dict[str, Size] = {}
    for (name, in_groups), size in sorted(every, key=lambda of: of[0].in_groups):
        if name is None or (in_groups and name not in sizes):
            continue
        expected = sizes.setdefault(name, size)
        fits = size == expected or (in_groups and expected != 0 and size % expected == 0)
        if not fits:
            a = "a multiple of the" if in_groups else "one"
            raise ValueError(
                f"{who}: expected {a} size of {name.removeprefix('own_')} in sharding; got {expected} and {size} in {rule!r}."
            )
    return sizes


# Of a term: a name, `_`, `...`, or something in parentheses.
_WORD = re.compile(r"\([^)]*\)|\S+")


def _dims(words: Sequence[str], ndim: int, rule: str, who: str) -> Sequence[_Dim]:
    in_groups = {word: word[1:-1].split()[0] for word in words if re.fullmatch(r"\(\s*\w+\s+_\s*\)", word)}
    names = [in_groups.get(word, word) for word in words]
    if "..." in names:
        if names.count("...") > 1 or names[0] != "...":
            raise ValueError(f"{who}: expected `...` in front of a term of sharding, once; got {rule!r}.")
        missing = ndim - (len(names) - 1)
        words, names = ([*(f"batch{missing - i}" for i in range(missing)), *texts[1:]] for texts in (words, names))
    if len(names) != ndim:
        raise ValueError(
            f"{who}: expected {ndim} names for an array of {ndim} dimensions in sharding; got {len(names)} in {rule!r}."
        )
    wrong = [name for name in names if not name.replace("_", "a").isalnum()]
    twice = [name for name, count in Counter(names).items() if count > 1 and name != "_"]
    if wrong or twice:
        raise ValueError(
            f"{who}: expected names of letters and digits, each once in a term of sharding; got {(wrong or twice)[0]!r} in "
            f"{rule!r}."
        )
    return [
        _WHOLE if name == "_" else _Dim(f"own_{name}", word in in_groups)
        for name, word in zip(names, words, strict=True)
    ]
