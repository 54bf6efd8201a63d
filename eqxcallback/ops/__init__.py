"""Arrays in, arrays out: one function for each op. A kernel where there is one for the platform, else the reference."""

from ._attention import attention as attention, decode_attention as decode_attention
from ._cache import cache_append as cache_append
from ._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from ._norm import layer_norm as layer_norm, rms_norm as rms_norm
from ._quantized import (
    ENCODINGS as ENCODINGS,
    Encoding as Encoding,
    dequantize as dequantize,
    quantized_linear as quantized_linear,
)
from ._rotary import rotary_embedding as rotary_embedding, rotary_table as rotary_table
from ._swiglu import swiglu as swiglu
