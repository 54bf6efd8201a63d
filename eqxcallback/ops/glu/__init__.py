"""The activations of feed-forward blocks, with a gate and without."""

from ._gelu import gelu as gelu
from ._glu import geglu as geglu, swiglu as swiglu
