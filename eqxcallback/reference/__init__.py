"""Every op in pure `jax.numpy`: its definition, and what its kernels are tested against. Imports nothing of ours."""

from ._attention import attention as attention, decode_attention as decode_attention
from ._cache import cache_append as cache_append
from ._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from ._norm import layer_norm as layer_norm, rms_norm as rms_norm
from ._precision import wide as wide
from ._quantized import dequantize as dequantize, quantized_linear as quantized_linear
from ._rotary import rotary_embedding as rotary_embedding
from ._swiglu import swiglu as swiglu
