"""The reference as the ops have it: keys and values are one argument, which `vmap` maps as a whole."""

from typing import Any

from jaxtyping import Array

from . import _reference


def of_pair(
    q: Any,
    kv: Any,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    query_segments: Any = None,
    key_segments: Any = None,
    lengths: Any = None,
    offset: Any = None,
    dropout_keys: Any = None,
    kept: Any = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Call the reference with `kv` as a pair. After `kv` come `OPTIONAL` of _operands.py, in its order."""
    segment_ids = None if query_segments is None else (query_segments, key_segments)
    more = (bias, mask, alibi_slopes, segment_ids, lengths, offset, dropout_keys, kept)
    return _reference.attention_with_lse(q, kv[0], kv[1], *more, **options)
