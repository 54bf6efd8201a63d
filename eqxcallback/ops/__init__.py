"""Arrays in, arrays out: one function for each op. A kernel where there is one for the platform, else the reference."""

from ..op import Implementation as Implementation
from ._add_norm import add_rms_norm as add_rms_norm
from ._attention import attention as attention
from ._cache import cache_append as cache_append
from ._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from ._decode_attention import decode_attention as decode_attention
from ._group_norm import group_norm as group_norm
from ._int8_linear import (
    Activations as Activations,
    int8_linear as int8_linear,
    quantize_int8 as quantize_int8,
)
from ._linear import embedding as embedding, linear as linear
from ._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from ._norm import layer_norm as layer_norm, rms_norm as rms_norm
from ._quantized import (
    ENCODINGS as ENCODINGS,
    Encoding as Encoding,
    dequantize as dequantize,
    quantize as quantize,
    quantized_linear as quantized_linear,
)
from ._recurrent import gru_gates as gru_gates, lstm_gates as lstm_gates
from ._rotary import rotary_embedding as rotary_embedding, rotary_table as rotary_table
from ._swiglu import geglu as geglu, swiglu as swiglu
