"""How programs find a Python callable: by a key in their text. And how long it lives."""

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _ext
from ._body import CallSpec, PythonBody


# MLIR's Python bindings make attributes of signed integers only.
_NUM_KEYS = 2**63

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
    state = body.eager_state()
    if state is None:
        state = EagerState(body)
        body.eager_state = weakref.ref(state)
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
