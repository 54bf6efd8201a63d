"""Compiled programs, kept on disk: the next start loads them."""

import os
import pathlib
from typing import Any

import jax


def keep_programs() -> None:
    """Keep what is compiled from now on in JAX's persistent cache, in the user's cache folder.

    JAX's own settings come first: `JAX_COMPILATION_CACHE_DIR` is another folder, and `JAX_ENABLE_COMPILATION_CACHE=false` keeps
    nothing. Nor is anything kept if the user has no home.
    """
    config: Any = jax.config  # type checkers do not know its options
    if config.jax_compilation_cache_dir is None:
        try:
            caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        except RuntimeError:  # HOME is not set, and the system does not know the user
            return
        config.update("jax_compilation_cache_dir", os.path.join(caches, "eqxcallback", "programs"))
    # By default only programs are kept that take a second to compile.
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
