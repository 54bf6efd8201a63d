"""What the attention kernels are compiled with, for an architecture and a shape. Needs no Triton.

Tiles were chosen by what a compiler can tell, without timing them: no spilled registers in the forward kernels up to a head size
of 128, shared memory within the limit, and the count of instructions in the loops. `tests/triton/` compiles them.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Choice:
    """The constants of a kernel, by name, and how it is compiled."""

    constants: dict[str, int | bool]
    num_warps: int
    num_stages: int


def split(size: int) -> tuple[int, int]:
    """The columns of a head in one or two tiles, each a power of two of at least 16, as tensor cores want them."""
    main = max(16, 1 << (size.bit_length() - 1))
    if size <= main:
        return main, 0
    tail = max(16, 1 << (size - main - 1).bit_length())
    return (main, tail) if tail < main else (2 * main, 0)


def queries_grid(choice: Choice, batch: int, queries: int, heads: int) -> int:
    """How many programs, in one dimension, of the kernels that take a block of queries each. None at all: no launch."""
    return math.ceil(queries / choice.constants["BLOCK_QUERIES"]) * heads * batch


def keys_grid(choice: Choice, kv_batch: int, keys: int, kv_heads: int) -> int:
    """How many programs of `attention_backward_keys`."""
    return math.ceil(keys / choice.constants["BLOCK_KEYS"]) * kv_heads * kv_batch


def choose_forward(
    arch: int, size: int, dtype: str, *, causal: bool, queries: int, keys: int, scale: float = 1.0
) -> Choice:
    """For `attention_forward`. `arch` is 80 for sm_80, `dtype` a name as NumPy has it; `scale` matters by its sign."""
    return _choice(_forward_tile(arch, _width(size), dtype, queries), size, causal, scale)


def choose_backward(
    arch: int, size: int, dtype: str, *, causal: bool, queries: int, keys: int, scale: float = 1.0
) -> tuple[Choice, Choice, Choice]:
    """For `attention_backward_rows`, `attention_backward_keys` and `attention_backward_queries`, in the order of launches."""
    width = _width(size)
    tiles = _rows_tile(arch, width, dtype), _keys_tile(arch, width, dtype), _queries_tile(arch, width, dtype)
    rows, of_keys, of_queries = (_choice(tile, size, causal, scale) for tile in tiles)
    return rows, of_keys, of_queries


# BLOCK_QUERIES, BLOCK_KEYS, num_warps, num_stages
_Tile = tuple[int, int, int, int]


def _forward_tile(arch: int, width: int, dtype: str, queries: int) -> _Tile:
    if dtype == "float32":
        return _full_precision_tile(width)
    if queries <= 16:
        # One token or a few: the time is that of reading keys, and rows that are not there cost nothing to speak of.
        return 16, 64, 4, 2
    if queries <= 64:
        return (64, 64, 4, 2) if width <= 128 else (64, 32, 8, 2)
    if arch < 90 or _little_shared_memory(arch):
        if width <= 96:
            return 128, 64, 8, 3
        # Blocks of 64 keys would spill. Blocks of 64 queries would not, but read keys and values twice as often.
        return (128, 32, 8, 3) if width <= 128 else (64, 32, 8, 2)
    if width <= 64:
        # On sm_90 two programs fit on a multiprocessor, and the softmax of one runs beside the products of the other. On
        # sm_100 accumulators come out of tensor memory to be scaled, for which four warps have too few registers.
        return (128, 64, 4, 3) if arch < 100 else (128, 64, 8, 3)
    # Two warpgroups of 64 queries each. With 128 keys a product is 64x128x16 an instruction, for which shared memory is fast
    # enough; with 64 keys it is just too slow. Three stages of keys and values take 224 of 227 KiB at 128.
    return (128, 128, 8, 3) if width <= 128 else (128, 64, 8, 2)


def _rows_tile(arch: int, width: int, dtype: str) -> _Tile:
    """As forward, without values: less shared memory, fewer registers."""
    if dtype == "float32":
        return 16, 32, 8, 2
    if arch < 90 or _little_shared_memory(arch):
        return (128, 64, 8, 3) if width <= 128 else (64, 64, 8, 2)
    return (128, 128, 8, 3) if width <= 128 else (128, 64, 8, 2)


def _keys_tile(arch: int, width: int, dtype: str) -> _Tile:
    """Two accumulators of keys by head size fill the registers, so blocks of queries are short.

    On sm_90, from a head size of 80 on, some registers spill, in the masked loop for the most part, which has few steps. Blocks
    of 32 queries do not spill and are slower: shared memory feeds half of the products then.
    """
    if dtype == "float32":
        return _full_precision_tile(width)
    if arch < 90 or _little_shared_memory(arch):
        return (64, 64, 8, 2) if width <= 128 else (16, 64, 8, 1)
    return (64, 128, 8, 2) if width <= 128 else (32, 64, 8, 2)


def _queries_tile(arch: int, width: int, dtype: str) -> _Tile:
    """One accumulator, and three products of a block of keys."""
    if dtype == "float32":
        return _full_precision_tile(width)
    if arch < 90 or _little_shared_memory(arch):
        if width <= 96:
            return 128, 64, 8, 2
        return (128, 32, 8, 2) if width <= 128 else (32, 32, 4, 2)
    return (128, 64, 8, 2) if width <= 128 else (64, 32, 8, 2)


def _full_precision_tile(width: int) -> _Tile:
    """f32 is multiplied by ordinary instructions, whose operands are all in registers: tiles are small."""
    return (32, 32, 8, 2) if width <= 128 else (16, 32, 8, 2)


def _little_shared_memory(arch: int) -> bool:
    """99 KiB for a program, where server cards have 163 (sm_80) and 227 (sm_90, sm_100)."""
    return arch in (86, 89) or arch >= 120


def _width(size: int) -> int:
    return sum(split(size))


def _choice(tile: _Tile, size: int, causal: bool, scale: float) -> Choice:
    block_queries, block_keys, num_warps, num_stages = tile
    main, tail = split(size)
    constants = {
        "SIZE": size,
        "MAIN": main,
        "TAIL": tail,
        "CAUSAL": causal,
        "NEGATIVE": scale < 0,
        "BLOCK_QUERIES": block_queries,
        "BLOCK_KEYS": block_keys,
    }
    return Choice(constants, num_warps, num_stages)
