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

from ._gpu_attention import TINY, Shape, jax_runner, peers
from ._rows import OURS, Row, Setting
from ._timing import Runner


Tile = tuple[int, int, int, int]

# For sm_90, by head size: what is in shared memory and registers there.
FORWARD: Mapping[int, Sequence[Tile]] = {
    128: [(128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
    64: [(128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 4, 2), (128, 64, 8, 3), (64, 64, 4, 4)],
}
# Of the second and third kernel of the backward pass: the gradients of keys and values, and that of queries.
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
def tile_of(step: int | None, tile: Tile | None) -> Iterator[None]:
    """Programs that are lowered inside take `tile`: for the forward kernel, or for the backward kernel of that number."""
    module = importlib.import_module("eqxcallback.ops.attention._triton")
    name = "choose_forward" if step is None else "choose_backward"
    before: Callable[..., Any] = getattr(module, name)

    def choose(*args: Any, **options: Any) -> Any:
        found = before(*args, **options)
        if tile is None:
            return found
        if step is None:
            return _with(found, tile)
        return tuple(_with(each, tile) if i == step else each for i, each in enumerate(found))

    setattr(module, name, choose)
    try:
        yield
    finally:
        setattr(module, name, before)


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
        for what, step, table in (("forward", None, FORWARD), ("of keys", 1, KEYS), ("of queries", 2, QUERIES)):
            if not setting.has_time():
                return
            tiles = [(16, 16, 4, 2)] if setting.tiny else table[shape.size]
            f, backward = peers(shape)[OURS], step is not None
            contestants: dict[str, Callable[[], Runner]] = {
                OURS: functools.partial(jax_runner, setting, f, shape, backward)
            }
            for tile in tiles:
                contestants[text(tile)] = functools.partial(_runner, setting, shape, step, tile)
            work = shape.flops * (3.5 if backward else 1)
            case = f"tiles of {'the forward kernel' if step is None else f'the backward kernel {what}'}, {shape}"
            yield Row(case, "TFLOP/s", work, setting.race(contestants))


def _runner(setting: Setting, shape: Shape, step: int | None, tile: Tile) -> Runner:
    f = peers(shape)[OURS]
    with tile_of(step, tile):
        # A function of its own: programs are kept by function and type, and do not know of tiles.
        runner = jax_runner(setting, lambda *args: f(*args), shape, step is not None)
        runner.run(1)  # which compiles it
    return runner
