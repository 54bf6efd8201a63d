"""The reference as the ops have it: keys and values are one argument, which `vmap` maps as a whole."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from . import _reference


def of_pair(
    q: Array,
    kv: Sequence[Array],
    bias: Array | None = None,
    mask: Array | None = None,
    alibi_slopes: Array | None = None,
    query_segments: Array | None = None,
    key_segments: Any = None,
    lengths: Array | None = None,
    offset: Array | None = None,
    dropout_keys: Array | None = None,
    kept: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Call the reference with `kv` as a pair. After `kv` come `OPTIONAL` of _operands.py, in its order."""
    segment_ids = None if query_segments is None else (query_segments, key_segments)
    more = (bias, mask, alibi_slopes, segment_ids, lengths, offset, dropout_keys, kept)
    return _reference.attention_with_lse(q, kv[0], kv[1], *more, **options)
