"""The gated activations of feed-forward blocks."""

from ._glu import geglu as geglu, swiglu as swiglu
