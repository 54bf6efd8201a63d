"""Softmax of the last axis."""

from ._softmax import softmax as softmax
