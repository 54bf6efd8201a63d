"""The identity of a Python callable in a compiled program, and how long it lives."""

import dataclasses
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _errors, _ext


# MLIR's Python bindings make attributes of signed integers only.
_NUM_KEYS = 2**63


class _SameObject:
    """Compares by `is`: for callables that have no hash, such as Modules that hold arrays."""

    def __init__(self, value: object):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _identity(callback: Callable[..., None]) -> object:
    """Two callbacks are the same, and share programs, if these are equal."""
    try:
        hash(callback)
        return callback
    except TypeError:
        pass
    owner, function = getattr(callback, "__self__", None), getattr(callback, "__func__", None)
    if owner is not None and function is not None:  # equinox makes a new bound method at each access
        return _SameObject(owner), function
    return _SameObject(callback)


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """What one call site declares.

    **Attributes:**

    - `result_avals`: of `result_aval`, one for each flat result.
    - `vmap_method`: one of `VMAP_METHODS`, or `None`.
    - `input_output_aliases`: sorted pairs of flat input and output indices.
    """

    result_avals: tuple[Any, ...]
    vmap_method: str | None
    has_side_effect: bool
    input_output_aliases: tuple[tuple[int, int], ...]
    command_buffer_compatible: bool

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:  # computed once: eager calls look their program up by it
        return self._hash


class PythonBody:
    """A callback with the trees of its arguments and results: what one call site of a program calls.

    Hashable, and equal for the same callback and trees: JAX compares primitives by it, so that the same function is one
    program.
    """

    def __init__(self, callback: Callable[..., None], in_tree: Any, out_tree: Any):
        self.callback = callback
        self.in_tree = in_tree
        self.out_tree = out_tree
        self._identity = (_identity(callback), in_tree, out_tree)
        self._hash = hash(self._identity)
        self._eager_state: weakref.ref[EagerState] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonBody) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return _errors.callable_name(self.callback)

    def __call__(self, ctx: _ext.ExecutionContext, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        args, kwargs = self.in_tree.unflatten(inputs)
        return self.callback(ctx, self.out_tree.unflatten(outputs), *args, **kwargs)

    @property
    def is_flat(self) -> bool:
        """Whether the callback takes its buffers one by one: `callback(ctx, out, *leaves)`."""
        leaf = jax.tree.structure(0)
        flat_args = jax.tree.structure(((0,) * self.in_tree.num_leaves, {}))
        return self.out_tree == leaf and self.in_tree == flat_args


_handles: weakref.WeakValueDictionary[PythonBody, _ext.Handle] = weakref.WeakValueDictionary()
_immortal: list[Callable[..., None]] = []
_lock = threading.RLock()  # comparing callbacks may run code of theirs


def handle_for(body: PythonBody) -> _ext.Handle:
    """The handle under which programs find `body`. It is freed with its last owner.

    The key is made from the callback's name and the trees, not from a counter or an address: it stands in the text of
    programs, and the next process should find the same text in its persistent cache. Whoever runs a cached program has
    traced and lowered it first, and so has put its own callable under that key.
    """
    with _lock:
        handle = _handles.get(body)
        if handle is None:
            key = _preferred_key(body)
            while _ext.Handle.exists(key):  # another callback of that name and those trees is alive
                key = (key + 1) % _NUM_KEYS
            direct = body.is_flat
            handle = _ext.Handle(key, body.callback if direct else body, direct=direct)
            _handles[body] = handle
        return handle


class EagerState:
    """What the owner of a callback keeps between eager calls. Programs refer to the body, so the body may not own it.

    **Attributes:**

    - `handle`: of the body.
    - `key`: the handle's key, as eager programs take it: two words, the lower one first.
    - `programs`: the compiled calls of this callback, on platforms where the key cannot be an operand.
    """

    def __init__(self, body: PythonBody):
        self.handle = handle_for(body)
        self.key = np.array([self.handle.key & 0xFFFFFFFF, self.handle.key >> 32], np.uint32)
        self.programs: dict[CallSpec, Callable[..., Any]] = {}


def eager_state(body: PythonBody) -> EagerState:
    """Of `body`: the one that somebody holds, or a new one."""
    state = None if body._eager_state is None else body._eager_state()
    if state is None:
        state = EagerState(body)
        body._eager_state = weakref.ref(state)
    return state


def keep_for_ever(handle: Callable[..., None]) -> None:
    """For programs that JAX gives no means to own a handle."""
    with _lock:
        if handle not in _immortal:
            _immortal.append(handle)


def _preferred_key(body: PythonBody) -> int:
    module = getattr(body.callback, "__module__", "")
    text = f"{module}:{body!r}:{body.in_tree}:{body.out_tree}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _NUM_KEYS


def _describe(outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]) -> str:
    def types(buffers: Sequence[_ext.Buffer]) -> str:
        return ", ".join(f"{b.dtype}[{','.join(map(str, b.shape))}]" for b in buffers)

    return f"({types(inputs)}) -> ({types(outputs)})"


def _on_failure(
    error: BaseException, body: Any, outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer], name_stack: str
) -> str:
    if isinstance(body, PythonBody):
        body = body.callback
        # Its own frame, PythonBody.__call__, is the first one: the user's start after it.
        if error.__traceback__ is not None:
            error = error.with_traceback(error.__traceback__.tb_next or error.__traceback__)
    return _errors.record_failure(error, _errors.callable_name(body), name_stack, _describe(outputs, inputs))


_ext.on_failure(_on_failure)
