"""A policy of `jax.checkpoint`: whose results it keeps."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ..xla import call_of
from ._forward_call import ForwardCall


def save_only_these_kernels(*ops: str) -> Callable[..., bool]:
    """A policy for `jax.checkpoint` that keeps the results of these ops and layers, so that their kernels do not run again for
    the gradient. What a kernel hands to its gradient, as attention does the logarithms of its sums, is kept too.

    !!! example

        ```python
        block = jax.checkpoint(block, policy=eqxcallback.save_only_these_kernels("attention"))
        ```

    `jax.checkpoint_policies.dots_saveable` and its like know XLA's own products, and no kernel. Join it with this one by
    `jax.checkpoint_policies.save_from_both_policies`.

    **Arguments:**

    - `ops`: their names, as the column `op` of [`eqxcallback.inspect`][] has them, such as `"attention"`; that of a layer is the
        name of its class. Calls of other names, and all derivatives, are computed again.

    **Returns:** What `jax.checkpoint` and `equinox.filter_checkpoint` take as `policy`.

    **Raises:** `TypeError` for what is not a name.
    """
    for op in ops:
        if not isinstance(op, str):
            raise TypeError(
                f"save_only_these_kernels: expected names of ops, as `eqxcallback.inspect` shows them; got {op!r}. "
                'Pass a text, such as "attention".'
            )
    return _SaveOnly(frozenset(ops))


@dataclasses.dataclass(frozen=True)  # equal policies share what JAX has traced
class _SaveOnly:
    ops: frozenset[str]

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> bool:
        call = call_of(primitive, params)
        return isinstance(call, ForwardCall) and call.bound.name in self.ops
