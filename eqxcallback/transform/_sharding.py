"""The rule by which an op may be split between devices, as users write it."""

from collections import Counter
from collections.abc import Sequence

from .. import xla
from ..core import Aval


def parse_sharding(
    rule: str, slots: Sequence[int | None], operands: Sequence[Aval], results: Sequence[Aval], who: str
) -> xla.Factors:
    """The factors of `"... d, d -> ... d"`: for each flat operand and result, the names of its dimensions.

    A name may be split between devices if all results have it: then each device calls the kernel on its own part. `_` is a
    dimension that is whole, and `...` stands for leading dimensions, aligned at their right end. So is one of the length 1 whose
    name has another length elsewhere: it is shared.

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
    named_dims = [
        [_dims(text.split(), len(aval.shape), rule, who) for text, aval in zip(side, avals, strict=True)]
        for side, avals in zip(lists, (operands, results), strict=True)
    ]
    sizes: dict[str, int] = {}
    for dims, aval in zip([*named_dims[0], *named_dims[1]], [*operands, *results], strict=True):
        for name, size in zip(dims, aval.shape, strict=True):
            if name is None or size == 1:
                continue
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"{who}: expected one size of {name.removeprefix('own_')} in sharding; got {sizes[name]} and {size} in "
                    f"{rule!r}."
                )
    named_dims = [
        [
            tuple(name if size == sizes.get(name or "") else None for name, size in zip(dims, aval.shape, strict=True))
            for dims, aval in zip(side, avals, strict=True)
        ]
        for side, avals in zip(named_dims, (operands, results), strict=True)
    ]
    shared = set.intersection(*(set(dims) for dims in named_dims[1])) if named_dims[1] else set()
    shared -= {None}

    def kept(dims: xla.Dims) -> xla.Dims:
        return tuple(name if name in shared else None for name in dims)

    return xla.Factors(tuple(map(kept, named_dims[0])), tuple(map(kept, named_dims[1])))


def _dims(names: Sequence[str], ndim: int, rule: str, who: str) -> xla.Dims:
    if "..." in names:
        if names.count("...") > 1 or names[0] != "...":
            raise ValueError(f"{who}: expected `...` in front of a term of sharding, once; got {rule!r}.")
        missing = ndim - (len(names) - 1)
        names = [*(f"batch{missing - i}" for i in range(missing)), *names[1:]]
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
    return tuple(None if name == "_" else f"own_{name}" for name in names)
