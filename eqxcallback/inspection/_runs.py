"""Observe what a program does when it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import xla
from ..core import PyTree, Value
from . import _costs, _profiler
from ._limits import limits
from ._profile import Profile
from ._program import Program, is_filter_jit
from ._report import ExternalCall
from ._rows import profile_of


def host_calls(fn: Callable[..., object], args: tuple[PyTree, ...], runs: int) -> tuple[int, ...]:
    """Count the host's calls of kernels in each of `runs` runs, on copies of `args`: a program may donate its operands."""
    jitted = isinstance(fn, jax.stages.Wrapped) or is_filter_jit(fn)
    # A function around it: Equinox warns of one that `jax.vmap` made.
    program = fn if jitted else eqx.filter_jit(lambda *args: fn(*args))
    counts = []
    for _ in range(runs):
        copies = _copies(args)
        before = xla.host_calls()
        jax.block_until_ready(eqx.filter(program(*copies), eqx.is_array))
        counts.append(xla.host_calls() - before)
    return tuple(counts)


def check_runnable(args: object, platform: str) -> None:
    """Check that a program can be profiled."""
    if platform != "cpu":
        raise ValueError(
            f"eqxcallback.inspect: expected profile=True for a program on a CPU; got one for {platform}. There "
            "jax.profiler.trace and a viewer show what ran."
        )
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"eqxcallback.inspect: expected arrays with profile=True, which runs the program; got {leaf}. Pass an array."
            )


def profile(
    program: Program, calls: Sequence[ExternalCall], sites: Sequence[xla.CallSite], text: str, repeats: int
) -> Profile:
    """Run a program several times, without and with JAX's profiler.

    **Arguments:**

    - `sites`: the site of each call.
    - `text`: of the compiled program.
    """

    def prepared() -> Callable[[], object]:
        args = _with_donated_copies(program)
        return lambda: _wait(program.jitted(*args))

    prepared()()  # which compiles it
    module = text.partition(",")[0].removeprefix("HloModule ")
    # Half of them before the profiled runs and half after, as others may use the machine too.
    seconds = _profiler.timed_runs(prepared, repeats // 2)
    runs = _profiler.profiled_runs(prepared, repeats, module)
    seconds += _profiler.timed_runs(prepared, repeats - repeats // 2)
    flops = [_costs.flops_of_reference(site) for site in sites]
    return profile_of(calls, flops, text, seconds, runs, limits())


def _wait(outs: object) -> None:
    jax.block_until_ready(outs)
    jax.effects_barrier()  # there may be no results


def _with_donated_copies(program: Program) -> Sequence[Value]:
    """Return arguments that the program may use up. Others are not copied: to write them anew would fill the caches."""
    donated = [info.donated for info in jax.tree.leaves(program.traced.args_info)]
    leaves, tree = jax.tree.flatten(program.args)
    if not any(donated):
        return program.args
    if len(donated) != len(leaves):  # some are static, and nobody says which
        return _copies(program.args)
    return jax.tree.unflatten(
        tree, [_copies(leaf) if used else leaf for leaf, used in zip(leaves, donated, strict=True)]
    )


def _copies(args: Any) -> Any:
    copies = jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, args)
    jax.block_until_ready(copies)
    return copies
