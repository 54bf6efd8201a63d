"""Norms of the last axis, and of groups of channels."""

from ._add_norm import add_rms_norm as add_rms_norm
from ._group_norm import group_norm as group_norm
from ._norm import layer_norm as layer_norm, rms_norm as rms_norm
