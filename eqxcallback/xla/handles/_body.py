"""The body of a call site: a Python callable, its identity, and what the call declares."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _ext
from ...core import Aval, PyTreeDef, callable_name, identity, strict_statics
from ..types import CallOptions


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The declarations of one call site.

    **Attributes:**

    - `result_avals`: of `result_aval`, one for each flat result.
    - `vmap_method`: one of `VMAP_METHODS`, or `None`.
    - `options`: aliases, layouts, and what XLA may do with the call.
    - `ordered`: whether calls with it run in the order of the program. Implies `has_side_effect`.
    - `keeps_parts`: whether each device calls on the parts of the operands that it has, instead of on whole ones.
    """

    result_avals: tuple[Aval, ...]
    vmap_method: str | None
    options: CallOptions
    ordered: bool = False
    keeps_parts: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:  # computed once: eager calls look their program up by it
        return self._hash


class _Leaf(enum.Enum):
    """A leaf in place of an array."""

    LEAF = 0


class PythonBody:
    """A callback with the trees of its arguments and results: what one call site of a program calls.

    Hashable, and equal for the same callback and trees: JAX compares primitives by it, so that the same function is one
    program.
    """

    def __init__(self, callback: Callable[..., None], in_tree: PyTreeDef | None, out_tree: PyTreeDef | None):
        self.callback = callback
        self.in_tree: PyTreeDef = in_tree
        self.out_tree: PyTreeDef = out_tree
        trees = () if in_tree is None else (in_tree, strict_statics(in_tree), out_tree, strict_statics(out_tree))
        self._identity = (identity(callback), trees)
        self._hash = hash(self._identity)
        self.eager_state: Callable[[], Any] = lambda: None  # a weak reference, see _handles.py
        self.kernel_handle: Any = None  # see _kernel_handle.py

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonBody) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return callable_name(self.callback)

    def __call__(
        self, ctx: _ext.ExecutionContext, outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]
    ) -> None:
        args, kwargs = self.in_tree.unflatten(inputs)
        return self.callback(ctx, self.out_tree.unflatten(outputs), *args, **kwargs)

    @property
    def description(self) -> str:
        """The same text in each process."""
        return f"{getattr(self.callback, '__module__', '')}:{self!r}:{self.in_tree}:{self.out_tree}"

    def portable(self) -> tuple[Any, ...]:
        """Return the parts that `of_portable` makes it of in another process. Trees cannot be pickled, but their parts can."""
        trees = [jax.tree.unflatten(tree, [_Leaf.LEAF] * tree.num_leaves) for tree in (self.in_tree, self.out_tree)]
        return type(self), self.callback, *trees

    @staticmethod
    def of_portable(parts: tuple[Any, ...]) -> "PythonBody":
        kind, callback, *trees = parts
        return kind(callback, *map(jax.tree.structure, trees))

    @property
    def is_flat(self) -> bool:
        """True if the callback takes its buffers one by one: `callback(ctx, out, *leaves)`."""
        leaf = jax.tree.structure(0)
        flat_args = jax.tree.structure(((0,) * self.in_tree.num_leaves, {}))
        return self.out_tree == leaf and self.in_tree == flat_args


class FlatBody(PythonBody):
    """A body that takes the flat buffers as they are: `body(ctx, outputs, inputs)`. XLA calls it directly."""

    def __init__(self, body: Callable[..., None]):
        super().__init__(body, None, None)

    def __call__(
        self, ctx: _ext.ExecutionContext, outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]
    ) -> None:
        return self.callback(ctx, outputs, inputs)

    @property
    def description(self) -> str:
        return repr(self.callback)

    def portable(self) -> tuple[Any, ...]:
        return type(self), self.callback

    @property
    def is_flat(self) -> bool:
        return False
