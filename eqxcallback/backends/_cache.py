"""Compiled images on disk, by their content: of whatever is named by the same key, there is one."""

import atexit
import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any


def key_of(parts: Sequence[object]) -> str:
    """A name for what these parts make, the same in each process."""
    return hashlib.blake2b(repr(tuple(parts)).encode(), digest_size=20).hexdigest()


def cache_folder() -> pathlib.Path:
    """`EQXCALLBACK_CACHE_DIR`, or `eqxcallback` where the user's caches are. Without a home it is a folder of this process."""
    chosen = os.environ.get("EQXCALLBACK_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen).absolute()  # a library without a folder in its name is looked for elsewhere
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "eqxcallback"
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return _temporary_folder()


@functools.cache
def _temporary_folder() -> pathlib.Path:
    """A folder that nobody else may write, as libraries are loaded from it, and that ends with the process."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="eqxcallback-cache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def load(key: str) -> tuple[Mapping[str, Any], bytes] | None:
    """Read what is stored under `key`: a description of an image, and the image. `None` if it is missing or not whole."""
    try:
        header, _, image = (cache_folder() / key).read_bytes().partition(b"\n")
        about = json.loads(header)
        if about.pop("digest") == _digest(image):
            return about, image
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    return None


def store(key: str, about: Mapping[str, object], image: bytes) -> None:
    """Keep them for other processes. A cache that cannot be written is left out, without an error."""
    try:
        place = cache_folder() / key
        place.parent.mkdir(parents=True, exist_ok=True)
        # Others see it whole or not at all. What does not fit a full disk is removed.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as folder:
            made = pathlib.Path(folder, "image")
            made.write_bytes(json.dumps({**about, "digest": _digest(image)}).encode() + b"\n" + image)
            os.replace(made, place)
    except OSError:
        pass


def _digest(image: bytes) -> str:
    return hashlib.blake2b(image, digest_size=16).hexdigest()
