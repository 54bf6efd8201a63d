"""Losses of logits."""

from ._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from ._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
