"""Attention: of many queries, and of one token over a cache."""

from ._attention import attention as attention
from ._decode import decode_attention as decode_attention
