"""The in-place callback, as users call it."""

from ._buffer_callback import buffer_callback as buffer_callback
