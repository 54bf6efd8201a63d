"""Kernels in Python: short bodies in NumPy and CuPy, which run where `implementation="python"` chooses them."""

from ...kernel import PythonKernel
from . import _attention, _cache, _cross_entropy, _linear, _norm, _recurrent, _rotary, _swiglu


ADD_RMS_NORM = PythonKernel(_norm.add_rms_norm, aliases={"residual": 1})
ATTENTION = PythonKernel(_attention.attention)
CACHE_APPEND = PythonKernel(_cache.cache_append, aliases={"cache": 0})
CROSS_ENTROPY = PythonKernel(_cross_entropy.softmax_cross_entropy)
DECODE_ATTENTION = PythonKernel(_attention.decode_attention)
EMBEDDING = PythonKernel(_linear.embedding)
GEGLU = PythonKernel(_swiglu.geglu)
GROUP_NORM = PythonKernel(_norm.group_norm)
GRU_GATES = PythonKernel(_recurrent.gru_gates)
INT8_DECODE_ATTENTION = PythonKernel(_attention.int8_decode_attention)
INT8_LINEAR = PythonKernel(_linear.int8_linear)
LAYER_NORM = PythonKernel(_norm.layer_norm)
LINEAR = PythonKernel(_linear.linear)
LINEAR_CROSS_ENTROPY = PythonKernel(_cross_entropy.linear_cross_entropy)
LSTM_GATES = PythonKernel(_recurrent.lstm_gates)
QUANTIZED_LINEAR = PythonKernel(_linear.quantized_linear)
RMS_NORM = PythonKernel(_norm.rms_norm)
ROTARY_EMBEDDING = PythonKernel(_rotary.rotary_embedding)
ROUNDED_INT8_LINEAR = PythonKernel(_linear.rounded_int8_linear)
ROUNDED_QUANTIZED_LINEAR = PythonKernel(_linear.rounded_quantized_linear)
SWIGLU = PythonKernel(_swiglu.swiglu)
