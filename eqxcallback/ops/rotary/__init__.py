"""Rotary position embedding."""

from ._rotary import rotary_embedding as rotary_embedding, rotary_table as rotary_table
from ._rotary_append import rotary_append as rotary_append
