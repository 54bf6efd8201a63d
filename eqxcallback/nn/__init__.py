"""Modules: they own parameters and call ops."""

from ._cache import KVCache as KVCache
from ._norm import RMSNorm as RMSNorm
from ._quantized import QuantizedLinear as QuantizedLinear
