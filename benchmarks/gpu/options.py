"""Attention with its options, against the peers that have them: what masks, windows and caches cost."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from .._contestants import Pass, normal, of_pass, operands, torch, torch_call
from .._rows import OURS, Goal, Row, Setting
from .._timing import Runner
from .attention import WITH_BACKWARD
from .torch_timing import torch_runner


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int

    def __str__(self) -> str:
        groups = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        lengths = f"s{self.keys}" if self.queries == self.keys else f"s{self.queries} over {self.keys}"
        return f"b{self.batch} h{self.heads}{groups} {lengths} d{self.size}"

    @property
    def flops(self) -> float:
        """Operations of a forward pass in which all keys are seen."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.size

    def qkv(self) -> list[jax.Array]:
        keys = self.batch, self.keys, self.kv_heads, self.size
        shapes = ((self.batch, self.queries, self.heads, self.size), keys, keys)
        return [normal(i, *shape, dtype=jnp.bfloat16) for i, shape in enumerate(shapes)]


class Case(NamedTuple):
    """**Attributes:**

    - `ours`: a function of queries, keys, values and `more`.
    - `theirs`: the same by `jax.nn.dot_product_attention`, where that has it, which also gets `implementation`.
    - `torch`: a function of `more` as tensors, which returns the arguments of PyTorch's, where it has them in one kernel.
    - `more`: other operands, of the sizes.
    - `share`: of the products that someone needs who reads no keys in vain.
    - `backward`: whether both passes are measured too.
    - `is_compared`: whether all contestants are to have the same results.
    """

    name: str
    ours: Callable[..., jax.Array]
    theirs: Callable[..., jax.Array] | None
    torch: Callable[..., dict[str, Any]] | None
    more: Callable[[Sizes], tuple[jax.Array, ...]]
    share: float
    backward: bool = True
    is_compared: bool = True


_jax = jax.nn.dot_product_attention


def _window(k: Any) -> int:
    return max(k.shape[1] // 4, 1)


def _documents(sizes: Sizes) -> jax.Array:
    """Four of the same length."""
    ids = np.repeat(np.arange(4, dtype=np.int32), -(-sizes.keys // 4))[: sizes.keys]
    return jnp.asarray(np.broadcast_to(ids, (sizes.batch, sizes.keys)))


def _same_document(ids: Any) -> Any:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def _lengths(sizes: Sizes) -> jax.Array:
    """Return lengths from half of the keys to all of them."""
    return jnp.asarray(np.linspace(sizes.keys / 2, sizes.keys, sizes.batch).astype(np.int32))


def _ours_in_window(q: Any, k: Any, v: Any) -> jax.Array:
    return ops.attention(q, k, v, causal=True, window=_window(k))


def _theirs_in_window(q: Any, k: Any, v: Any, **how: Any) -> jax.Array:
    return _jax(q, k, v, is_causal=True, local_window_size=(_window(k) - 1, 0), **how)


def _random_mask(sizes: Sizes) -> tuple[jax.Array]:
    shape = sizes.batch, 1, sizes.queries, sizes.keys
    return (jnp.asarray(np.random.default_rng(3).random(shape, np.float32) < 0.9),)


def _added(option: str, more: Callable[[Sizes], tuple[jax.Array]]) -> Case:
    """One operand that all have: for PyTorch it is added to the logits, or a mask, by its dtype."""
    return Case(
        f"a {option}",
        lambda q, k, v, x: ops.attention(q, k, v, **{option: x}),
        lambda q, k, v, x, **how: _jax(q, k, v, **{option: x}, **how),
        lambda x: {"attn_mask": x},
        more,
        1.0,
    )


# The most telling ones first.
CASES = [
    Case(
        "documents",
        lambda q, k, v, ids: ops.attention(q, k, v, causal=True, segment_ids=ids),
        lambda q, k, v, ids, **how: _jax(q, k, v, mask=_same_document(ids), is_causal=True, **how),
        None,
        lambda sizes: (_documents(sizes),),
        0.125,
    ),
    Case("a window of a quarter", _ours_in_window, _theirs_in_window, None, lambda sizes: (), 0.22),
    Case(
        "lengths",
        lambda q, k, v, n: ops.attention(q, k, v, lengths=n),
        lambda q, k, v, n, **how: _jax(q, k, v, key_value_seq_lengths=n, **how),
        None,
        lambda sizes: (_lengths(sizes),),
        0.75,
    ),
    _added("mask", _random_mask),
    _added("bias", lambda sizes: (normal(4, 1, sizes.heads, sizes.queries, sizes.keys, dtype=jnp.bfloat16),)),
    Case(
        "dropout of 0.1",
        lambda q, k, v, key: ops.attention(q, k, v, dropout=0.1, key=jax.random.split(key, q.shape[0])),
        None,
        lambda: {"dropout_p": 0.1},
        lambda sizes: (jax.random.key(0),),
        1.0,
        is_compared=False,  # each has random numbers of its own
    ),
]
# Of few queries: a prompt's last chunk, or tokens that are guessed, over a cache.
OVER_A_CACHE = Case(
    "over a cache",
    lambda q, k, v, n: ops.attention(q, k, v, causal=True, lengths=n, offset=n - q.shape[1]),
    lambda q, k, v, n, **how: _jax(q, k, v, key_value_seq_lengths=n, **how),
    None,
    lambda sizes: (jnp.full(sizes.batch, sizes.keys, jnp.int32),),
    1.0,
    backward=False,
    is_compared=False,  # the last queries see a few keys less than theirs
)
SIZES = Sizes(4, 16, 16, 4096, 4096, 128)
FEW_QUERIES = [Sizes(1, 32, 8, 8, 32_768, 128), Sizes(8, 32, 8, 16, 8192, 128), Sizes(1, 32, 8, 512, 32_768, 128)]
TINY, TINY_FEW = Sizes(2, 4, 4, 32, 32, 16), [Sizes(2, 4, 2, 4, 64, 16)]


def measure(setting: Setting) -> Iterator[Row]:
    of_all = TINY if setting.tiny else SIZES
    for case in CASES[:3] if setting.quick and not setting.tiny else CASES:
        yield from _rows(setting, case, of_all)
    for sizes in TINY_FEW if setting.tiny else FEW_QUERIES:
        yield from _rows(setting, OVER_A_CACHE, sizes)


def _rows(setting: Setting, case: Case, sizes: Sizes) -> Iterator[Row]:
    passes: tuple[Pass, ...] = ("forward", "forward + backward") if case.backward else ("forward",)
    for which in passes:
        if not setting.has_time():
            return
        race = setting.race(_contestants(setting, case, sizes, which))
        work = sizes.flops * case.share * (WITH_BACKWARD if which == "forward + backward" else 1)
        goals = tuple(Goal(peer, 0.8) for peer in ("cuDNN", "XLA") if peer in race.seconds)
        yield Row(f"{which}, {case.name}, {sizes}", "TFLOP/s", work, race, goals)


def _contestants(setting: Setting, case: Case, sizes: Sizes, which: Pass) -> dict[str, Callable[[], Runner]]:
    args = (*sizes.qkv(), *case.more(sizes))
    fs: dict[str, Callable[..., jax.Array]] = {OURS: case.ours}
    if case.theirs is not None:
        names = {"cuDNN": "cudnn", "XLA": "xla"}
        fs |= {name: functools.partial(case.theirs, implementation=how) for name, how in names.items()}
        if setting.tiny:
            del fs["cuDNN"]
    given = operands(case.ours, which, args)

    def runner(f: Callable[..., jax.Array]) -> Runner:
        made = setting.clock.runner(of_pass(f, which, (0, 1, 2)), *given)
        return made if case.is_compared else made._replace(result=None)

    runners = {name: functools.partial(runner, f) for name, f in fs.items()}
    if setting.torch and case.torch is not None:
        runners["torch SDPA"] = functools.partial(_of_torch, case, which, given)
    return runners


def _of_torch(case: Case, which: Pass, given: tuple[Any, ...]) -> Runner:
    attend = torch().nn.functional.scaled_dot_product_attention
    wanted = [x for x in given if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert case.torch is not None
    options = case.torch

    def f(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), **options(*more)).transpose(1, 2)

    made = torch_runner(functools.partial(torch_call, f, which, (0, 1, 2)), wanted)
    return made if case.is_compared else made._replace(result=None)
