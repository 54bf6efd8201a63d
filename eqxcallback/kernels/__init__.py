"""Our kernels for GPUs: their sources (`cuda/`, `triton/`), and how each of them is launched."""

from ._attention import ATTENTION as ATTENTION, ATTENTION_BACKWARD as ATTENTION_BACKWARD
from ._cache import CACHE_APPEND as CACHE_APPEND
from ._cross_entropy import CROSS_ENTROPY as CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD as CROSS_ENTROPY_BACKWARD
from ._decode_attention import DECODE_ATTENTION as DECODE_ATTENTION
from ._norm import (
    LAYER_NORM as LAYER_NORM,
    LAYER_NORM_BACKWARD as LAYER_NORM_BACKWARD,
    RMS_NORM as RMS_NORM,
    RMS_NORM_BACKWARD as RMS_NORM_BACKWARD,
)
from ._quantized import QUANTIZED_LINEAR as QUANTIZED_LINEAR
from ._rotary import (
    ROTARY_EMBEDDING as ROTARY_EMBEDDING,
    ROTARY_EMBEDDING_BACKWARD as ROTARY_EMBEDDING_BACKWARD,
)
from ._swiglu import SWIGLU as SWIGLU, SWIGLU_BACKWARD as SWIGLU_BACKWARD
