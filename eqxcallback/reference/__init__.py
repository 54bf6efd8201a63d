"""Every op in pure `jax.numpy`: its definition, and what its kernels are tested against. Imports nothing of ours."""

from ._add_norm import add_rms_norm as add_rms_norm
from ._attention import (
    attention as attention,
    decode_attention as decode_attention,
    int8_decode_attention as int8_decode_attention,
)
from ._cache import cache_append as cache_append
from ._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from ._group_norm import group_norm as group_norm
from ._int8_linear import int8_linear as int8_linear, rounded_int8_linear as rounded_int8_linear
from ._linear import embedding as embedding, linear as linear
from ._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from ._norm import layer_norm as layer_norm, rms_norm as rms_norm
from ._precision import wide as wide
from ._quantize import quantize as quantize, quantize_int8 as quantize_int8
from ._quantized import (
    dequantize as dequantize,
    quantized_linear as quantized_linear,
    rounded_quantized_linear as rounded_quantized_linear,
)
from ._recurrent import gru_gates as gru_gates, lstm_gates as lstm_gates
from ._rotary import rotary_embedding as rotary_embedding
from ._rounding import rounded as rounded
from ._swiglu import geglu as geglu, swiglu as swiglu
