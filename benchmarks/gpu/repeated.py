"""Many calls in one program. The host takes about 45 us to call a compiled function, and many kernels take less."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


# Of a GPU that does not say how large its cache is.
CACHE_BYTES = 64 << 20
# The results of all calls of a program are kept.
_MOST_RESULT_BYTES = 4 << 30


class Repeats(NamedTuple):
    """**Attributes:**

    - `below`: seconds of a call: those that take as long are timed one by one.
    - `seconds`: of a program.
    - `fewest`, `most`: calls in a program. Each of them takes time to compile.
    - `cache_bytes`: of the device's last cache.
    """

    below: float = 300e-6
    seconds: float = 1e-3
    fewest: int = 8
    most: int = 16
    cache_bytes: float = CACHE_BYTES

    def calls(self, seconds: float, result_bytes: int = 0) -> int:
        """Return how many calls that take so long make a program."""
        wanted = min(self.most, max(self.fewest, round(self.seconds / max(seconds, 1e-9))))
        return max(1, min(wanted, _MOST_RESULT_BYTES // max(result_bytes, 1)))

    def operand_sets(self, args: Sequence[Any], calls: int) -> list[Sequence[Any]]:
        """Return `args` and as many copies as exceed four times the cache, so that no call finds there what an earlier one has
        read. Small ones never do: they are measured from the cache, as they are in use."""
        enough = 4 * self.cache_bytes / max(nbytes(args), 1)
        count = math.ceil(min(calls, enough))
        return [args, *(jax.tree.map(_copy, args) for _ in range(count - 1))]


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return jnp.copy(leaf)


def repeated(f: Callable[..., Any], calls: int) -> Callable[[Sequence[Sequence[Any]]], list[Any]]:
    """A function of sets of operands: the results of `f` of one set after the other, from the first again after the last.

    The operands of a call are tied to the results of the one before, so that XLA for GPUs neither merges calls nor runs two side
    by side. XLA for CPUs forgets that before it merges: there each call needs a set of its own.
    """

    def program(sets: Sequence[Sequence[Any]]) -> list[Any]:
        results: list[Any] = []
        for i in range(calls):
            args = sets[i % len(sets)]
            if results:
                # What is tied is returned: XLA takes out of a barrier what no one uses.
                args, results[-1] = jax.lax.optimization_barrier((args, results[-1]))
            results.append(f(*args))
        return results

    return program
