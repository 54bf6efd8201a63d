"""Tell a function that the user calls from one that a transformation of JAX's calls."""

# Compiler options are only for programs that no transformation is around: JAX raises otherwise, and there is no public way to
# ask before. Noticed by: tests/inspection/test_jit_captured.py.
from jax._src.core import trace_state_clean as _trace_state_clean


def is_outermost() -> bool:
    """Eager `grad` and `vmap` are transformations too."""
    return _trace_state_clean()
