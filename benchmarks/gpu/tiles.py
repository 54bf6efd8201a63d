"""Other tiles for attention than those that the package takes, which were chosen without a GPU: `--tiles` compares them.

A tile is `(BLOCK_QUERIES, BLOCK_KEYS, num_warps, num_stages)`. What wins goes into
eqxcallback/ops/attention/_triton_tiles.py.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .._rows import OURS, Row, Setting
from .._timing import Runner
from .attention import TINY, WITH_BACKWARD, Shape, jax_runner, peers


Tile = tuple[int, int, int, int]

# For sm_90, by head size: what is in shared memory and registers there.
FORWARD: Mapping[int, Sequence[Tile]] = {
    128: [(128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
    64: [(128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 4, 2), (128, 64, 8, 3), (64, 64, 4, 4)],
}
# Of two kernels of the backward pass: the gradients of keys and values, and that of queries.
KEYS: Mapping[int, Sequence[Tile]] = {
    128: [(64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 1), (128, 128, 8, 1)],
    64: [(64, 128, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2)],
}
QUERIES: Mapping[int, Sequence[Tile]] = {
    128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 128, 8, 1)],
    64: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2)],
}
SHAPES = [Shape(4, 16, 16, 4096, 128, causal=True), Shape(8, 32, 32, 1024, 64, causal=True)]


@contextlib.contextmanager
def tile_of(kernel: str, tile: Tile) -> Iterator[None]:
    """Programs that are lowered inside take `tile` for the kernel of that name."""
    chosen: dict[str, Any] = importlib.import_module("eqxcallback.ops.attention._triton_tiles").CHOOSE
    before = chosen[kernel]
    chosen[kernel] = lambda *args, **options: _with(before(*args, **options), tile)
    try:
        yield
    finally:
        chosen[kernel] = before


def _with(choice: Any, tile: Tile) -> Any:
    queries, keys, num_warps, num_stages = tile
    blocks = {"BLOCK_QUERIES": queries, "BLOCK_KEYS": keys}
    return dataclasses.replace(
        choice, constants={**choice.constants, **blocks}, num_warps=num_warps, num_stages=num_stages
    )


def text(tile: Tile) -> str:
    return "{}x{} w{} s{}".format(*tile)


def measure(setting: Setting) -> Iterator[Row]:
    for shape in TINY if setting.tiny else SHAPES:
        for kernel, table in (("forward", FORWARD), ("keys", KEYS), ("queries", QUERIES)):
            if not setting.has_time():
                return
            tiles = [(16, 16, 4, 2)] if setting.tiny else table[shape.size]
            f, backward = peers(shape)[OURS], kernel != "forward"
            contestants: dict[str, Callable[[], Runner]] = {
                OURS: functools.partial(jax_runner, setting, f, shape, backward)
            }
            for tile in tiles:
                contestants[text(tile)] = functools.partial(_runner, setting, shape, kernel, tile)
            work = shape.flops * (WITH_BACKWARD if backward else 1)
            case = f"tiles of the {f'backward kernel of {kernel}' if backward else 'forward kernel'}, {shape}"
            yield Row(case, "TFLOP/s", work, setting.race(contestants))


def _runner(setting: Setting, shape: Shape, kernel: str, tile: Tile) -> Runner:
    f = peers(shape)[OURS]
    with tile_of(kernel, tile):
        # A function of its own: programs are kept by function and type, and do not know of tiles.
        runner = jax_runner(setting, lambda *args: f(*args), shape, kernel != "forward")
        runner.run(1)  # which compiles it
    return runner
