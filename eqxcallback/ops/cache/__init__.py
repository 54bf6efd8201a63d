"""Rows written into a cache."""

from ._cache import cache_append as cache_append
