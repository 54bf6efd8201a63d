"""Choose the constants of the attention kernels for an architecture and a shape. Needs no Triton.

Most tiles were chosen by what a compiler can tell, without timing them: no spilled registers in the forward kernels up to a head
size of 128, shared memory within the limit, and the count of instructions in the loops. `tests/triton/` compiles them. Those that
were measured say so.
"""

import dataclasses

from ._operands import OPTIONAL


@dataclasses.dataclass(frozen=True)
class Choice:
    """The constants of a kernel, by name, and how it is compiled."""

    constants: dict[str, int]
    num_warps: int
    num_stages: int


def split(size: int) -> tuple[int, int]:
    """The columns of a head in one or two tiles, each a power of two of at least 16, as tensor cores want them."""
    main = max(16, 1 << (size.bit_length() - 1))
    if size <= main:
        return main, 0
    tail = max(16, 1 << (size - main - 1).bit_length())
    return (main, tail) if tail < main else (2 * main, 0)


def choose_forward(
    arch: int, size: int, dtype: str, *, queries: int, has: int = 0, soft_cap: float = 0.0, **_: object
) -> Choice:
    """Choose for `attention_forward`. `arch` is 80 for sm_80, `dtype` NumPy's name, `has` a bit for each of `OPTIONAL`."""
    return _choice(_forward_tile(arch, _width(size), dtype, queries, _of_pairs(has, soft_cap)), size, PACKED=False)


def choose_packed(arch: int, size: int, dtype: str, *, rows: int, **_: object) -> Choice:
    """Choose for `attention_forward` where it is `PACKED`. `rows`: the queries of all heads that share one head of keys."""
    block = packed_rows(size, dtype, rows)
    if dtype == "float32":
        return _choice((block, 32, 8, 2), size, PACKED=True)
    # The time is that of reading keys.
    keys = 64 if _width(size) <= 128 and not _little_shared_memory(arch) else 32
    return _choice((block, keys, 4, 2), size, PACKED=True)


def packed_rows(size: int, dtype: str, rows: int) -> int:
    """The rows of a block of `choose_packed`, which are the same on all architectures."""
    most = 16 if dtype == "float32" else 64 if _width(size) <= 128 else 32
    return min(most, max(16, 1 << (rows - 1).bit_length()))


def choose_rows(arch: int, size: int, dtype: str, **_: object) -> Choice:
    """Choose for `attention_backward_rows`, which reads each row once."""
    return _choice((64, 16, 4, 1), size)


def choose_keys(arch: int, size: int, dtype: str, *, has: int = 0, soft_cap: float = 0.0, **_: object) -> Choice:
    """Choose for `attention_backward_keys`."""
    return _choice(_keys_tile(arch, _width(size), dtype, _of_pairs(has, soft_cap)), size)


def choose_queries(arch: int, size: int, dtype: str, *, has: int = 0, soft_cap: float = 0.0, **_: object) -> Choice:
    """Choose for `attention_backward_queries`, and for the kernel of slopes, which adds up what it leaves."""
    return _choice(_queries_tile(arch, _width(size), dtype, _of_pairs(has, soft_cap)), size)


def choose_bias(arch: int, size: int, dtype: str, **_: object) -> Choice:
    """Choose for `attention_backward_bias`."""
    width = _width(size)
    if dtype == "float32":
        return _choice((32, 32, 8, 1) if width <= 128 else (16, 16, 4, 1), size)
    return _choice((64, 64, 8, 1) if width <= 128 else (32, 32, 4, 1), size)


def _of_pairs(has: int, soft_cap: float) -> bool:
    """True if some option needs registers for each pair of a query and a key. Segments do not: most blocks are not asked, and
    the tiles of a call without options were the faster ones on an H200, for documents of 100 to 8,192 tokens.
    """
    names = "bias", "mask", "alibi_slopes", "dropout_keys", "kept"
    return bool(soft_cap) or any(has >> OPTIONAL.index(name) & 1 for name in names)


# By kernel.
CHOOSE = {
    "forward": choose_forward,
    "packed": choose_packed,
    "rows": choose_rows,
    "keys": choose_keys,
    "queries": choose_queries,
    "bias": choose_bias,
}


# BLOCK_QUERIES, BLOCK_KEYS, num_warps, num_stages
_Tile = tuple[int, int, int, int]


def _forward_tile(arch: int, width: int, dtype: str, queries: int, of_pairs: bool) -> _Tile:
    if dtype == "float32":
        return _full_precision_tile(width)
    if queries <= 16:
        # One token or a few: the time is that of reading keys, and rows that are not there cost nothing to speak of.
        return 16, 64, 4, 2
    if queries <= 64:
        return (64, 64, 4, 2) if width <= 128 else (64, 32, 8, 2)
    if of_pairs:
        if width <= 128:
            return 128, 64 if width <= 64 else 32, 8, 2
        return (32, 32, 4, 2) if _little_shared_memory(arch) else (64, 32, 8, 2)
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


def _keys_tile(arch: int, width: int, dtype: str, of_pairs: bool) -> _Tile:
    """Two accumulators of keys by head size fill the registers, so blocks of queries are short.

    On sm_90 some registers spill, in the masked loop for the most part, which has few steps. Blocks of 32 queries do not spill
    and are slower: shared memory feeds half of the products then.
    """
    if dtype == "float32":
        return _full_precision_tile(width, of_pairs)
    if arch == 90 and width <= 64 and not of_pairs:
        # Measured on an H100, forward and backward, in bf16: eight examples of 1,024 tokens and 32 heads of 64, causal, have 216
        # TFLOP/s, and 192 with 128 keys and eight warps, of whose registers fewer spill.
        return 64, 64, 4, 2
    if of_pairs and width <= 128:
        return 32, 64 if _little_shared_memory(arch) else 128, 8, 2
    if arch < 90 or _little_shared_memory(arch):
        return (64, 64, 8, 2) if width <= 128 else (16, 64, 8, 1)
    return (64, 128, 8, 2) if width <= 128 else (32, 64, 8, 2)


def _queries_tile(arch: int, width: int, dtype: str, of_pairs: bool) -> _Tile:
    """One accumulator, and three products of a block of keys."""
    if dtype == "float32":
        return _full_precision_tile(width, of_pairs)
    if arch == 90 and width <= 128 and not of_pairs:
        # Measured on an H100, forward and backward, in bf16. Four examples of 4,096 tokens and 16 heads of 128 have 350 TFLOP/s
        # causal and 385 not, and with 128 queries and eight warps 331 and 368; with a third stage 338 causal, with 32 keys and
        # three stages 352, with 128 keys 308. Eight of 1,024 and 32 heads of 64, causal: 197, and 192.
        return 64, 64, 4, 2
    if of_pairs and 64 < width <= 128:
        return 64 if _little_shared_memory(arch) else 128, 32, 8, 2
    if arch < 90 or _little_shared_memory(arch):
        if width <= 96:
            return 128, 64, 8, 2
        return (128, 32, 8, 2) if width <= 128 else (32, 32, 4, 2)
    return (128, 64, 8, 2) if width <= 128 else (64, 32, 8, 2)


def _full_precision_tile(width: int, of_pairs: bool = False) -> _Tile:
    """f32 is multiplied by ordinary instructions, whose operands are all in registers: tiles are small.

    **Arguments:** `of_pairs`: of a gradient, in which 32 keys of 256 leave 1 KiB of 99 to options.
    """
    if width <= 128:
        return 32, 32, 8, 2
    return 16, 16 if of_pairs else 32, 8, 2


def _little_shared_memory(arch: int) -> bool:
    """99 KiB for a program, where server cards have 163 (sm_80) and 227 (sm_90, sm_100)."""
    return arch in (86, 89) or arch >= 120


def _width(size: int) -> int:
    return sum(split(size))


def _choice(tile: _Tile, size: int, **more: int) -> Choice:
    block_queries, block_keys, num_warps, num_stages = tile
    main, tail = split(size)
    blocks = {"BLOCK_QUERIES": block_queries, "BLOCK_KEYS": block_keys}
    return Choice({"SIZE": size, "MAIN": main, "TAIL": tail, **blocks, **more}, num_warps, num_stages)
