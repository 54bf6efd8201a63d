"""Handles: programs find a Python callable by a key in their text. And how long a handle lives."""

import hashlib
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ... import _ext
from ._body import CallSpec, FlatBody, PythonBody


# From there on are the keys of exported programs.
_NUM_KEYS = 2**62

# By the hash of the body. Nothing global may hold a body: its callback may hold what holds the handle.
_handles: dict[int, list[weakref.ref[_ext.Handle]]] = {}
# In the text of functions and objects: another one in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_immortal: list[Callable[..., None]] = []
_lock = threading.RLock()  # comparing callbacks may run code of theirs


def handle_for(body: PythonBody) -> _ext.Handle:
    """The handle under which programs find `body`. It is freed with its last owner.

    The key is made from the callback's name and the trees, not from a counter or an address: it stands in the text of
    programs, and the next process should find the same text in its persistent cache. Whoever runs a cached program has
    traced and lowered it first, and so has put its own callable under that key.
    """
    with _lock:
        alive = [(ref, handle) for ref in _handles.get(hash(body), ()) if (handle := ref()) is not None]
        for _, handle in alive:
            if handle.owner == body:
                return handle
        key = _preferred_key(body)
        while _ext.Handle.exists(key):  # another callback of that name and those trees is alive
            key = (key + 1) % _NUM_KEYS
        called = body.callback if body.is_flat or isinstance(body, FlatBody) else body
        handle = _ext.Handle(key, called, body, direct=body.is_flat)
        _handles[hash(body)] = [*(ref for ref, _ in alive), weakref.ref(handle, _forget(hash(body)))]
        return handle


def _forget(index: int) -> Callable[[object], None]:
    def forget(_: object) -> None:
        with _lock:
            alive = [ref for ref in _handles.get(index, ()) if ref() is not None]
            if alive:
                _handles[index] = alive
            else:
                _handles.pop(index, None)

    return forget


class EagerState:
    """The state that the owner of a callback keeps between eager calls. Programs refer to the body, so the body may not own it.

    **Attributes:**

    - `handle`: of the body.
    - `programs`: the compiled calls of this callback, on platforms where the key cannot be an operand.
    """

    def __init__(self, body: PythonBody):
        self.handle: _ext.Handle = handle_for(body)
        self.programs: dict[CallSpec, Callable[..., Any]] = {}
        self._words = np.array([self.handle.key & 0xFFFFFFFF, self.handle.key >> 32], np.uint32)
        self._keys: dict[object, jax.Array] = {}

    def key(self, like: jax.Array | None) -> Any:
        """The handle's key as eager programs take it: two words, the lower one first. Where `like` is, and committed to
        that device if it is: then nothing is transferred in the call, and results are where they would be without it."""
        if like is None or len(devices := like.devices()) > 1:
            return self._words
        (device,) = devices
        place = (device, like.committed)
        key = self._keys.get(place)
        if key is None:
            with jax.default_device(device):
                key = self._keys[place] = jax.device_put(self._words, device if like.committed else None)
        return key


def eager_state(body: PythonBody) -> EagerState:
    """Return the state of `body`: the one that somebody holds, or a new one."""
    state = body.eager_state()
    if state is None:
        state = EagerState(body)
        body.eager_state = weakref.ref(state)
    return state


def keep_for_ever(handle: Callable[..., None]) -> None:
    """Keep a handle for ever, for programs that JAX gives no means to own it."""
    with _lock:
        if handle not in _immortal:
            _immortal.append(handle)


def _preferred_key(body: PythonBody) -> int:
    text = _ADDRESS.sub("", body.description)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _NUM_KEYS
