"""Attention: of many queries, and of one token over a cache."""

from ._attention import attention as attention, attention_with_lse as attention_with_lse
from ._decode import decode_attention as decode_attention
