"""Modules: they own parameters and call ops."""

# The rest of `equinox.nn` as it is, so that this module can be imported in its place.
from equinox.nn import (
    AdaptiveAvgPool1d as AdaptiveAvgPool1d,
    AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AdaptiveAvgPool3d as AdaptiveAvgPool3d,
    AdaptiveMaxPool1d as AdaptiveMaxPool1d,
    AdaptiveMaxPool2d as AdaptiveMaxPool2d,
    AdaptiveMaxPool3d as AdaptiveMaxPool3d,
    AdaptivePool as AdaptivePool,
    AvgPool1d as AvgPool1d,
    AvgPool2d as AvgPool2d,
    AvgPool3d as AvgPool3d,
    BatchNorm as BatchNorm,
    Conv as Conv,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
    ConvTranspose as ConvTranspose,
    ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d,
    ConvTranspose3d as ConvTranspose3d,
    delete_init_state as delete_init_state,
    Dropout as Dropout,
    Identity as Identity,
    inference_mode as inference_mode,
    Lambda as Lambda,
    make_with_state as make_with_state,
    MaxPool1d as MaxPool1d,
    MaxPool2d as MaxPool2d,
    MaxPool3d as MaxPool3d,
    Pool as Pool,
    PReLU as PReLU,
    Sequential as Sequential,
    Shared as Shared,
    SpectralNorm as SpectralNorm,
    State as State,
    StatefulLayer as StatefulLayer,
    StateIndex as StateIndex,
    WeightNorm as WeightNorm,
)

from ._add_norm import FusedAddRMSNorm as FusedAddRMSNorm
from ._attention import MultiheadAttention as MultiheadAttention
from ._cache import KVCache as KVCache
from ._embedding import Embedding as Embedding
from ._glu import GEGLU as GEGLU, SwiGLU as SwiGLU
from ._group_norm import GroupNorm as GroupNorm
from ._grouped_attention import GroupedQueryAttention as GroupedQueryAttention
from ._linear import Linear as Linear
from ._loss import FusedLinearCrossEntropy as FusedLinearCrossEntropy, SoftmaxCrossEntropy as SoftmaxCrossEntropy
from ._mlp import MLP as MLP
from ._norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from ._quantized import QuantizedLinear as QuantizedLinear
from ._rnn import GRUCell as GRUCell, LSTMCell as LSTMCell
from ._rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
