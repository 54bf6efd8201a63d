"""Attention of some shape: operands, what the reference says of them, and what the interpreted kernels do."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eqxcallback.ops.attention import _reference as reference, _triton_tiles as tiles


# What the op has after q, k and v: tests/triton/test_options.py.
ABSENT = (None,) * 9
# Examples and heads of it, which nobody reads, and the settings of none.
NO_SCALARS = (1,) * 20
NO_OPTIONS = {"WINDOW": 0, "SOFT_CAP": 0.0, "DROPOUT": 0.0, "KEEP": 0, "HAS": 0}
F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
MODULES = "eqxcallback.ops.attention"


@dataclasses.dataclass(frozen=True)
class Case:
    queries: int
    keys: int
    size: int = 20
    causal: bool = False
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    kv_batch: int = 1
    scale: float | None = None
    dtype: np.dtype = F32
    # The first columns of q and k are such that all logits are larger by this.
    offset: float = 0.0
    # Of queries and keys. None: what the library takes.
    tile: tuple[int, int] | None = (16, 16)

    def __str__(self):
        changed = [
            f"{field.name}={getattr(self, field.name)}".replace(" ", "")
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "-".join(changed)

    @property
    def used_scale(self):
        return 1 / math.sqrt(self.size) if self.scale is None else self.scale

    @functools.cached_property
    def operands(self):
        """`q, k, v, dout`."""
        rng = np.random.default_rng(1)
        shapes = [(self.batch, self.queries, self.heads)] * 2 + [(self.kv_batch, self.keys, self.kv_heads)] * 2
        q, dout, k, v = (rng.standard_normal((*shape, self.size)) for shape in shapes)
        if self.offset:
            q[..., 0], k[..., 0] = self.offset / self.used_scale, 1
        return tuple(x.astype(self.dtype) for x in (q, k, v, dout))

    @functools.cached_property
    def wanted(self):
        """`out`, the gradients, and `lse`, of the same values in f64."""
        with jax.enable_x64(True):
            wide = [jnp.asarray(x.astype(np.float64)) for x in self.operands]
            return [np.asarray(x) for x in _definition(self.causal, self.used_scale)(*wide)]

    @property
    def lse(self):
        return self.wanted[4]

    @property
    def scalars(self):
        sizes = (self.batch, self.queries, self.keys, self.heads, self.kv_heads, self.kv_batch, self.used_scale)
        return (*sizes, *NO_SCALARS)

    def forward(self, interpreter):
        """`q, k, v, out, lse`, as the kernel leaves them."""
        q, k, v, _ = self.operands
        constants = self._constants(tiles.choose_forward)
        parts = (np.zeros(1, np.float32),) * 2
        args = (q, k, v, *ABSENT, _poison(q), _poison(self._rows), *parts, *self.scalars, 0)
        left = interpreter(
            f"{MODULES}._triton_forward", "attention_forward", self._of_queries(constants), args, constants
        )
        return [x for x in left if isinstance(x, np.ndarray)][:5]

    def backward(self, interpreter, needed=(True, True, True)):
        """`q, k, v, out, dout, dq, dk, dv, sums, delta`, as the kernels leave them. Gradients not `needed` are `None`."""
        q, k, v, dout = self.operands
        # The result of the forward kernel was rounded as well.
        out, lse = self.wanted[0].astype(self.dtype), self.lse.astype(np.float32)
        grads = [_poison(x) if is_needed else None for x, is_needed in zip((q, k, v), needed, strict=True)]
        results = (out, lse, dout, np.zeros_like(lse))
        workspaces = (_poison(np.moveaxis(self._rows, 1, 2).copy()), _poison(np.moveaxis(self._rows, 1, 2).copy()))
        arrays = [q, k, v, *ABSENT, *results, *grads, *ABSENT, *workspaces, np.zeros(1, np.float32)]
        rows, of_keys, of_queries = map(self._constants, (tiles.choose_rows, tiles.choose_keys, tiles.choose_queries))
        launches = [
            ("rows", rows, self._of_queries(rows)),
            ("keys", of_keys, -(-self.keys // of_keys["BLOCK_KEYS"]) * self.kv_heads * self.kv_batch),
            ("queries", of_queries, self._of_queries(of_queries)),
        ]
        for name, constants, grid in launches:
            if grid:
                kernel = f"{MODULES}._triton_backward", f"attention_backward_{name}"
                arrays = interpreter(*kernel, grid, (*arrays, *self.scalars), constants)[: len(arrays)]
        return [*arrays[:3], arrays[12], arrays[14], *arrays[16:19], *arrays[28:30]]

    @property
    def _rows(self):
        return np.empty((self.batch, self.queries, self.heads), np.float32)

    def check(self, got, want, rtol=0.0):
        """`rtol` is for what the reference loses in the kernels' precision."""
        # Weights and dlogits are rounded to 16 bits before they are multiplied, out and the gradients after it. In f32
        # it is the order of the sums.
        eps = float(ml_dtypes.finfo(self.dtype).eps) * (16 if self.dtype == F32 else 1.5)
        assert got.dtype == self.dtype
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=(eps + rtol) * scale)

    def _constants(self, choose: Any) -> dict[str, Any]:
        choice = choose(90, self.size, self.dtype.name, queries=self.queries)
        blocks = {} if self.tile is None else dict(zip(("BLOCK_QUERIES", "BLOCK_KEYS"), self.tile, strict=True))
        return choice.constants | blocks | NO_OPTIONS | {"CAUSAL": self.causal, "NEGATIVE": self.used_scale < 0}

    def _of_queries(self, constants: dict[str, Any]) -> int:
        return -(-self.queries // constants["BLOCK_QUERIES"]) * self.heads * self.batch


@functools.cache
def _definition(causal, scale):
    def attention(q, k, v):
        times = q.shape[0] // k.shape[0]
        k, v = jnp.tile(k, (times, 1, 1, 1)), jnp.tile(v, (times, 1, 1, 1))
        return reference.attention_with_lse(q, k, v, causal=causal, scale=scale)

    def both(q, k, v, dout):
        out, vjp, lse = jax.vjp(attention, q, k, v, has_aux=True)
        return out, *vjp(dout), lse

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})


def _poison(array):
    return np.full_like(array, np.nan)


SIZES = [Case(17, 33, size, causal=True, heads=2) for size in (1, 40, 64, 80, 96, 128, 256)]
GROUPS = [
    Case(17, 20, heads=4, kv_heads=2),
    Case(17, 20, heads=4, kv_heads=1, causal=True, tile=(16, 32)),
    Case(5, 20, heads=6, kv_heads=3, batch=2, kv_batch=2),
]
LENGTHS = [
    *[Case(queries, keys, causal=True) for queries in (1, 17, 50) for keys in (0, 1, 17, 50)],
    *[Case(queries, keys) for queries in (1, 17) for keys in (0, 1, 17, 33)],
    Case(130, 130, causal=True, tile=(32, 64)),
    Case(130, 1, causal=True, tile=(32, 16)),
    Case(1, 130, tile=(16, 32)),
    Case(70, 130, causal=True, tile=(64, 16)),
    Case(100, 37, causal=True, tile=(16, 64)),
]
SHARED = [
    Case(17, 20, batch=4, heads=2, kv_batch=kv_batch, causal=causal, tile=(32, 16))
    for kv_batch, causal in ((1, True), (2, False))
]
SCALES = [Case(20, 20, causal=causal, scale=scale) for scale in (-0.7, 0.0) for causal in (True, False)]
DTYPES = [
    Case(40, 50, size, causal=True, dtype=dtype, tile=(32, 16)) for dtype in (F16, BF16) for size in (40, 64, 80, 256)
]
LIBRARY_TILES = [
    *[Case(150, 170, size, causal=True, dtype=BF16, tile=None) for size in (64, 80, 128, 256)],
    Case(1, 100, 128, causal=True, heads=4, kv_heads=2, dtype=BF16, tile=None),
    Case(40, 130, 96, dtype=F16, tile=None),
    Case(50, 60, 128, causal=True, tile=None),
]
ALL = [*SIZES, *GROUPS, *LENGTHS, *SHARED, *SCALES, *DTYPES, *LIBRARY_TILES]
