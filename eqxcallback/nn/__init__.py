"""Modules: they own parameters and call ops."""

from ._add_norm import FusedAddRMSNorm as FusedAddRMSNorm
from ._attention import MultiheadAttention as MultiheadAttention
from ._cache import KVCache as KVCache
from ._embedding import Embedding as Embedding
from ._group_norm import GroupNorm as GroupNorm
from ._glu import GEGLU as GEGLU, SwiGLU as SwiGLU
from ._grouped_attention import GroupedQueryAttention as GroupedQueryAttention
from ._linear import Linear as Linear
from ._loss import FusedLinearCrossEntropy as FusedLinearCrossEntropy, SoftmaxCrossEntropy as SoftmaxCrossEntropy
from ._mlp import MLP as MLP
from ._norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from ._quantized import QuantizedLinear as QuantizedLinear
from ._rnn import GRUCell as GRUCell, LSTMCell as LSTMCell
from ._rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
