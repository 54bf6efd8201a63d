"""Arrays in, arrays out: one function for each op. A kernel where there is one for the platform, else the reference."""

from ..transform import Implementation as Implementation
from ._quantized_linear_swiglu import quantized_linear_swiglu as quantized_linear_swiglu
from ._supports import KERNEL_DTYPES as KERNEL_DTYPES
from .attention import (
    attention as attention,
    attention_with_lse as attention_with_lse,
    decode_attention as decode_attention,
)
from .cache import cache_append as cache_append
from .glu import geglu as geglu, gelu as gelu, swiglu as swiglu
from .linear import (
    DEINTERLEAVED as DEINTERLEAVED,
    ENCODINGS as ENCODINGS,
    INTERLEAVED as INTERLEAVED,
    INTERLEAVED_ROWS as INTERLEAVED_ROWS,
    Activations as Activations,
    Encoding as Encoding,
    deinterleave_rows as deinterleave_rows,
    dequantize as dequantize,
    embedding as embedding,
    int8_linear as int8_linear,
    interleave_rows as interleave_rows,
    linear as linear,
    quantize as quantize,
    quantize_int8 as quantize_int8,
    quantized_linear as quantized_linear,
)
from .loss import linear_cross_entropy as linear_cross_entropy, softmax_cross_entropy as softmax_cross_entropy
from .norm import add_rms_norm as add_rms_norm, group_norm as group_norm, layer_norm as layer_norm, rms_norm as rms_norm
from .recurrent import gru_gates as gru_gates, lstm_gates as lstm_gates
from .rotary import (
    rotary_append as rotary_append,
    rotary_embedding as rotary_embedding,
    rotary_table as rotary_table,
)
from .softmax import softmax as softmax
