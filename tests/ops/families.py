"""The tables of all families, as one."""

import functools
import importlib
import pathlib
from typing import Any

import jax

from eqxcallback import _ext

from .table import DTYPES, Case, Row, has_backward_kernels, has_kernels, quickly_compiled, together


# Each folder beside this file is a family's.
FAMILIES = {
    path.parent.name: importlib.import_module(f"{__package__}.{path.parent.name}.cases")
    for path in sorted(pathlib.Path(__file__).parent.glob("*/cases.py"))
}
ROWS = [row for family in FAMILIES.values() for row in family.CASES]


def tagged(tag: str) -> list[Row]:
    return [row for row in ROWS if tag in row.tags]


def edges() -> dict[str, list[Row]]:
    """The rows at the edges that kernels of CPUs take, by op."""
    return by_op([*tagged("edge"), *tagged("cpu edge")])


def by_op(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows by the function that makes their cases, which has the op's name."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.make.__name__, []).append(row)
    return families


@functools.cache
def ops_with_kernels(backend: str) -> frozenset[str]:
    """The names of those whose kernels for GPUs are of this kind, "cuda" or "triton"."""
    return frozenset(op for op, case in _one_of_each().items() if has_kernels(case, backend))


@functools.cache
def ops_with_backward_kernels(backend: str) -> frozenset[str]:
    """The names of those whose gradients are computed by such a kernel too."""
    return frozenset(op for op in ops_with_kernels(backend) if has_backward_kernels(_one_of_each()[op], backend))


def _one_of_each() -> dict[str, Case]:
    return {op: rows[0](DTYPES[0]) for op, rows in by_op(tagged("edge")).items()}


@functools.cache
def every_case(op: str, dtype: Any) -> tuple[list[Case], Any]:
    """Return the cases of the edges of an op, and what is to come out."""
    cases = [row(dtype) for row in edges()[op]]
    references = quickly_compiled(together(tuple(case.reference for case in cases)))
    return cases, jax.device_get(references([case.wide() for case in cases]))


@functools.cache
def every_result(op: str, dtype: Any, isa: str) -> Any:
    cases, _ = every_case(op, dtype)
    assert isa == _ext.isa()
    return jax.jit(together(tuple(case.op for case in cases)))([case.args for case in cases])
