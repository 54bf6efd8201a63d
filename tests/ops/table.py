"""A row in the table of a family, and how close its result has to come. The tables are in <family>/cases.py."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eqxcallback import xla


DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
# Of a number that is rounded once.
ROUNDING = {DTYPES[0]: 2.0**-21, DTYPES[1]: 2.0**-8, DTYPES[2]: 2.0**-11}
BATCHES = [(), (3,), (2, 3)]
# With their operand larger than the caches: rows of whole vectors, and of others.
STREAMED = [(4100, 1056), (4100, 1058)]

# What takes a row.
TAGS = {
    "edge": "every kernel, and every dtype, on every instruction set and GPU: sizes at the edges",
    "cpu edge": "every kernel of a CPU, as above: encodings that it unpacks, or that are for it alone",
    "large": "the same with work for many threads: more than kSerialNanoseconds of csrc/cpu/executor.h",
    "written": "what is written, and what is not: odd sizes, and more bytes of results than a C library keeps at hand",
    "streamed": "ops of rows that know nothing of each other: all of `STREAMED` at once, and in parts",
    "gradient": "kernels of gradients, of every dtype on every instruction set",
    "large gradient": "the same with work for many threads",
    "mapped": "vmap of each operand",
    "derived": "derivatives of both modes and orders",
    "model": "GPUs, at sizes of language models: the rows of a batch of prompts or of a token, vocabularies, heads",
    "cuda": "a kernel in CUDA C++ by itself, and its gradients, in guarded memory: packs, warps, blocks, and more than fits",
    "python": "the kernel in Python, of every dtype",
    "python mapped": "the same under vmap",
    "python derived": "its gradients",
    "python checked": "some rows of `eqxcallback.testing.check` of it",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """`op(*args)` is what `reference(*args)` is. `terms` are added up for each element of the result."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple[Any, ...]
    terms: int
    dtype: Any = None  # of the result, if it is not that of the first operand

    def wide(self) -> list[Any]:
        return [wide(x) for x in self.args]

    def want(self) -> Any:
        return np.asarray(quickly_compiled(self.reference)(*self.wide()))

    def check(self, got: Any, want: Any = None) -> None:
        want = self.want() if want is None else want
        assert got.dtype == (self.args[0].dtype if self.dtype is None else self.dtype)
        tolerate(got, want, self.terms)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """`make(dtype, *arguments)` is the case. `tags` are some of `TAGS`."""

    make: Callable[..., Case]
    arguments: tuple[Any, ...]
    tags: frozenset[str]
    name: str

    def __call__(self, dtype: Any) -> Case:
        return self.make(dtype, *self.arguments)

    def __str__(self) -> str:
        return self.name

    @functools.cache  # noqa: B019 - the tables are never let go of
    def wanted(self, dtype: Any) -> tuple[Case, Any]:
        """The case and the result, computed once for all instruction sets."""
        case = self(dtype)
        return case, case.want()


def row(make: Callable[..., Case], *arguments: Any, tags: Iterable[str], name: str | None = None) -> Row:
    """`name`: that of the op and the arguments, if it is not given."""
    tags = frozenset(tags)
    assert tags <= TAGS.keys(), tags
    default = "-".join(str(part).replace(" ", "") for part in (make.__name__, *arguments))
    return Row(make, arguments, tags, default if name is None else name)


def rows(make: Callable[..., Case], shapes: Iterable[tuple[Any, ...]], *tags: str) -> list[Row]:
    return [row(make, *arguments, tags=tags) for arguments in shapes]


def python(name: str, op: Callable[..., Any], operands: Callable[[Any], Any], *tags: str) -> Row:
    """A call of `op` with `operands(dtype)`, for its kernel in Python."""
    reference = functools.partial(op, implementation="reference")
    return row(lambda dtype: Case(op, reference, tuple(operands(dtype)), 1), tags=("python", *tags), name=name)


def tolerate(got: Any, want: Any, terms: int) -> None:
    """As close as the order of the sums allows; bf16 and f16 are rounded once."""
    got = np.asarray(got)
    scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
    rtol = ROUNDING.get(got.dtype, 2.0**-21)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=rtol, atol=2.0**-21 * math.sqrt(terms + 1) * scale)


def wide(x: Any) -> Any:
    """The same values in f32."""
    return np.asarray(x, np.float32) if getattr(x, "dtype", None) in DTYPES else x


@functools.cache
def quickly_compiled(function: Callable[..., Any]) -> Any:
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def together(functions: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """One function of the operands of each: it compiles in a tenth of the time that they take one by one."""
    return lambda operands: [function(*args) for function, args in zip(functions, operands, strict=True)]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel, some arguments of which may be absent, and its reference. `terms` is that of `Case`."""

    native: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple[Any, ...]
    terms: int = 1


def check_calls(calls: Iterable[Call]) -> None:
    """All results of several calls, in one program, and of their references, in another: it is the same one for each dtype."""
    calls = list(calls)
    results = quickly_compiled(together(tuple(call.native for call in calls)))([call.args for call in calls])
    references = quickly_compiled(together(tuple(call.reference for call in calls)))
    wanted = references([tuple(map(wide, call.args)) for call in calls])
    for call, got, want in zip(calls, results, wanted, strict=True):
        for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == call.args[0].dtype
            tolerate(one, np.asarray(exact), call.terms)


@functools.cache
def with_options(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """One function for each choice of options: JAX compiles it once for each shape."""
    return functools.partial(function, **options)


@functools.cache
def gradients_of_sum(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return the gradients with respect to the first `count` arguments."""
    return jax.grad(lambda *args: function(*args).astype(jnp.float32).sum(), tuple(range(count)))


def normal(seed: int, shape: Any, dtype: Any = np.float32, scale: float = 1.0) -> Any:
    return (scale * np.random.default_rng((seed, *shape)).standard_normal(shape)).astype(dtype)


def floats(dtype: Any, *shapes: Any, scale: float = 1.0) -> list[Any]:
    return [normal(i, shape, dtype, scale) for i, shape in enumerate(shapes)]


def kernels_of(function: Callable[..., Any], *args: Any, platform: str = "cuda") -> list[str]:
    """Return the kind of kernel that each call of an op in a program runs: "cuda", "triton" and others, or "reference"."""
    sites = xla.call_sites(jax.make_jaxpr(function)(*args), platform)
    chosen = [site.params["call"].choice(platform).kernel for site in sites if site.primitive == "op"]
    return ["reference" if bound is None else bound.kernel.backend for bound in chosen]


def has_kernels(case: Case, backend: str) -> bool:
    """True if the kernel that a GPU runs for the case is of this kind."""
    return kernels_of(case.op, *case.args) == [backend]


def has_backward_kernels(case: Case, backend: str) -> bool:
    """True if the kernel of the case and that of its gradients are both of this kind."""

    def loss(*args: Any) -> Any:
        return (case.op(*args).astype(jnp.float32) ** 2).sum()

    return kernels_of(jax.grad(loss, floating(case.args)), *case.args) == [backend] * 2


def floating(args: Iterable[Any]) -> tuple[int, ...]:
    """The indices of those that may be differentiated."""
    return tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
