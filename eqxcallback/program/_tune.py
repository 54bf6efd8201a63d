"""Find the fastest of several kernels by measuring on the device that is there."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import transform
from ..core import AnyNumber, Failures, KernelError, PyTree, number
from ..transform import Contest
from ._agreement import host, is_finite, why_wrong


_ROUNDS = 7
_SECONDS_OF_A_ROUND = 0.01
# Where XLA leaves out a call, as without elements, no number of them takes any time.
_MOST_CALLS = 2**24

_Called = Callable[[PyTree], PyTree]
_Run = Callable[[int], PyTree]
_Results = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of [`eqxcallback.tune`][] for one call.

    **Attributes:**

    - `op`: the name of the op or layer.
    - `call`: the types and options that its kernels were asked with.
    - `device`: the device, in words.
    - `kernels`: what each of the kernels is, in words: its kind, its name, and where it differs from the first.
    - `seconds`: for each kernel, how long the whole function took with it. The function is the same but for this kernel.
    - `failed`: for each kernel, why it did not run, or in what its results are wrong, or `""`. Its seconds are infinite.
    - `winner`: the number of the kernel that runs from now on.
    """

    op: str
    call: str
    device: str
    kernels: tuple[str, ...]
    seconds: tuple[float, ...]
    failed: tuple[str, ...]
    winner: int

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}"]
        for i, (kernel, seconds, failed) in enumerate(zip(self.kernels, self.seconds, self.failed, strict=True)):
            mark = "*" if i == self.winner else " "
            lines.append(f" {mark} {kernel}: {failed or f'{seconds * 1e6:.1f} us'}")
        return "\n".join(lines)


class _NoKernelRuns(ValueError):
    pass


def tune(fn: Callable[..., PyTree], *args: PyTree, rtol: AnyNumber | None = None) -> list[Tuned]:
    """Measure which kernel of each op is the fastest, and keep that on disk.

    An op may have several kernels for a platform: with other block sizes, in other languages, by other people. The first one
    that takes a call runs. `tune` runs `fn` with each of those that take it, on the default device, and from then on the
    fastest one is the first: for calls of the same types and options, on devices of the same kind, and in other processes too.
    Nothing but this function ever measures. A kernel with which `fn` returns something else than with the op's reference loses;
    where an op has none, its kernels are compared with the first one whose results are finite.

    !!! example

        ```python
        kernels = [dataclasses.replace(kernel, constexprs={"BLOCK": block}) for block in (256, 1024, 4096)]
        op = eqxcallback.Op("saxpy", kernels={"cuda": kernels}, reference=reference)
        for tuned in eqxcallback.tune(op, x, y):
            print(tuned)
        ```

    The winners are files in the folder `tuned` of `EQXCALLBACK_CACHE_DIR`; to forget them, delete it. A kernel that changes, its
    source, its functions or its settings, has to be measured again. A program that was compiled before keeps its kernels until
    `jax.clear_caches()`. Results may differ in their last bits between kernels, and hence between machines that measured.

    **Arguments:**

    - `fn`: a function of `args`, or a Module: an op, a layer, or a part of a model with its gradient. With several ops in it, one
        after the other is measured, and the program is compiled as often as there are kernels: a small function is sooner done.
    - `args`: arrays, PyTrees of them and Modules, with the values that matter: kernels may take longer for some. A `jax.Ref` is
        one of the same values, made anew for each call.
    - `rtol`: how far results of `fn` may be from those of the reference, as a part of the largest value of each array. By default
        half of the digits of its dtype, in 16 bits a tenth, and nothing for integers. More is for kernels that round by design,
        as in 8 bits; with `inf`, nothing is compared.

    **Returns:**

    What was measured: one [`eqxcallback.Tuned`][] for each call that several kernels take, none if there is no such call.

    **Raises:** what `fn` raises, and `ValueError` under `jit`, for types in place of arrays, or if no kernel of an op is right.
    """
    if rtol is not None:
        rtol = number("eqxcallback.tune", "rtol to be None or a number from 0", rtol, least=0)
    if not callable(fn):
        raise TypeError(f"eqxcallback.tune: expected a function; got {fn!r} of type {type(fn).__name__}.")
    for leaf in jax.tree.leaves((fn, args)):
        if isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
            raise ValueError(
                f"eqxcallback.tune: expected arrays, called outside of jit; got {leaf}. It runs the function."
            )
    is_ref = jax.tree.map(lambda leaf: isinstance(leaf, jax.Ref), (fn, args))
    values = jax.tree.map(lambda leaf, is_ref: leaf[...] if is_ref else leaf, (fn, args), is_ref)
    arrays, static = eqx.partition(values, eqx.is_array)

    def called(arrays: PyTree) -> PyTree:
        values = eqx.combine(arrays, static)
        function, args = jax.tree.map(lambda leaf, is_ref: jax.new_ref(leaf) if is_ref else leaf, values, is_ref)
        results = eqx.filter(function(*args), _has_values)
        # XLA leaves out calls that only change a Ref which nobody reads.
        refs = [leaf[...] for leaf in jax.tree.leaves((function, args)) if isinstance(leaf, jax.Ref)]
        return jax.tree.map(_without_keys, (results, refs))

    winners: dict[Contest, int] = {}
    results = []
    while contests := _unmeasured(called, arrays, winners):
        errors = []
        for contest in contests:
            try:
                result = _measured(called, arrays, contest, winners, rtol)
            except _NoKernelRuns as error:
                errors.append(error)  # perhaps for the kernel of another contest, which will have lost then
                continue
            winners[contest] = result.winner
            transform.store(contest, result.winner, dataclasses.asdict(result))
            results.append(result)
        if len(errors) == len(contests):
            raise errors[0]
    return results


def _unmeasured(called: _Called, arrays: PyTree, winners: Mapping[Contest, int]) -> list[Contest]:
    # Tracing under `vmap` or `grad` asks for kernels of calls that are not in the program.
    traced = jax.jit(lambda arrays: called(arrays)).trace(arrays)
    with transform.trial(winners) as met:
        try:
            traced.lower()
        except Exception:
            # A kernel that does not compile is not an error yet, if there is another one to take its place.
            if met.keys() <= winners.keys():
                raise
    return [contest for contest in met if contest not in winners]


def _measured(
    called: _Called, arrays: PyTree, contest: Contest, winners: Mapping[Contest, int], rtol: float | None
) -> Tuned:
    runs: dict[int, _Run] = {}
    results: dict[int, _Results] = {}
    failed = [""] * len(contest.kernels)
    kernels = [bound.kernel for bound in contest.bound]
    texts = [_text(kernel, kernels[0], bound.name) for kernel, bound in zip(kernels, contest.bound, strict=True)]
    for i in range(len(contest.kernels)):
        try:
            with transform.trial({**winners, contest: i}):
                run = _compiled(called, arrays)
            results[i] = _try(run)
            runs[i] = run
        except Exception as error:  # one kernel that does not compile must not end it for all
            failed[i] = _reason(error)
    if runs:
        want, whose = _expected(called, arrays, contest, winners) or _of_first(results, texts)
        failed = [why_wrong(results[i], want, rtol, whose) if i in runs else failed[i] for i in range(len(failed))]
        runs = {i: run for i, run in runs.items() if not failed[i]}
    if not runs:
        remedy = " For kernels that round by design, pass rtol." if results else ""
        raise _NoKernelRuns(f"eqxcallback.tune: no kernel of {contest.op} runs this call: {'; '.join(failed)}.{remedy}")
    seconds = _race(runs)
    return Tuned(
        contest.op,
        contest.call,
        contest.device,
        tuple(texts),
        tuple(seconds.get(i, float("inf")) for i in range(len(kernels))),
        tuple(failed),
        min(seconds, key=seconds.__getitem__),
    )


def _expected(
    called: _Called, arrays: PyTree, contest: Contest, winners: Mapping[Contest, int]
) -> tuple[_Results, str] | None:
    """Return what `called` gives if the reference runs in the place of these kernels, and `None` if it cannot run."""
    try:
        with transform.trial({**winners, contest: None}):
            run = _compiled(called, arrays)
        return _try(run), "the reference"
    except Exception:  # a reference may need more memory than there is
        return None


def _of_first(results: Mapping[int, _Results], texts: Sequence[str]) -> tuple[_Results, str]:
    """Return the first results that are finite. If none are, those of the first kernel."""
    first = next((i for i, of_one in results.items() if is_finite(of_one)), next(iter(results)))
    return results[first], texts[first]


def _try(run: _Run) -> _Results:
    """The results of one call. A kernel in Python that fails raises its own exception: XLA's has the text of a traceback."""
    with Failures() as failures:
        try:
            return host(run(1))
        except Exception as error:
            failures.reraise(error)


def _reason(error: Exception) -> str:
    original = error.original if isinstance(error, KernelError) else error
    return f"{type(original).__name__}: {str(original).strip().partition(chr(10))[0]}"


def _has_values(result: Any) -> bool:
    """False for what is not an array, and for the gradients of integers, which have shapes alone."""
    return eqx.is_array(result) and result.dtype != jax.dtypes.float0


def _without_keys(result: Any) -> Any:
    """Typed keys have no zeros, and are no numbers."""
    return jax.random.key_data(result) if jnp.issubdtype(result.dtype, jax.dtypes.prng_key) else result


def _compiled(called: _Called, arrays: PyTree) -> _Run:
    """A program that calls the function so many times, each time after the last one: the host's time does not count."""

    def looped(arrays: PyTree, count: Any) -> Any:
        def body(_: object, carry: PyTree) -> PyTree:
            arrays, results = carry
            arrays = _tied(arrays, results, count < 0)
            return arrays, called(arrays)

        like = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), jax.eval_shape(called, arrays))
        return jax.lax.fori_loop(0, count, body, (arrays, like))[1]

    program = jax.jit(looped).lower(arrays, jnp.int32(1)).compile()
    return lambda count: program(arrays, jnp.int32(count))


def _tied(arrays: PyTree, results: PyTree, never: PyTree) -> PyTree:
    """`arrays`, which XLA cannot know to be the same in each iteration: it would compute what depends on them before the loop.
    One element of each is written in place, which is the same work whatever kernel runs.
    """
    firsts = [jnp.real(leaf.ravel()[0]).astype(jnp.float32) for leaf in jax.tree.leaves(results) if leaf.size]
    token = sum(firsts, jnp.float32(0))

    def tied(leaf: Any) -> Any:
        if not leaf.size or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        first = (0,) * leaf.ndim
        return leaf.at[first].set(jnp.where(never, token.astype(leaf.dtype), leaf[first]))

    return jax.tree.map(tied, arrays)


def _race(runs: Mapping[int, _Run]) -> dict[int, float]:
    """The median seconds of one call of each. They take turns, so that a slow moment of the machine hits all."""
    counts = {i: _count(run) for i, run in runs.items()}
    samples: dict[int, list[float]] = {i: [] for i in runs}
    for _ in range(_ROUNDS):
        for i, run in runs.items():
            samples[i].append(_seconds(run, counts[i]) / counts[i])
    return {i: statistics.median(of_one) for i, of_one in samples.items()}


def _count(run: _Run) -> int:
    """Return how many calls make a round."""
    count = 1
    while (seconds := _seconds(run, count)) < _SECONDS_OF_A_ROUND / 4 and count < _MOST_CALLS:
        count *= 4
    return max(1, min(_MOST_CALLS, round(count * _SECONDS_OF_A_ROUND / seconds)))


def _seconds(run: _Run, count: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(count))
    return time.perf_counter() - start


def _text(kernel: Any, first: Any, name: str) -> str:
    """Write a kernel's kind and name, and the fields in which it differs from another of its kind."""
    text = f"{kernel.backend} kernel {name}"
    if kernel is first or type(kernel) is not type(first):
        return text
    differs: Sequence[str] = [
        f"{field.name}={getattr(kernel, field.name)!r}"
        for field in dataclasses.fields(kernel)
        if getattr(kernel, field.name) != getattr(first, field.name) and field.name != "source"
    ]
    return ", ".join([text, *differs])
