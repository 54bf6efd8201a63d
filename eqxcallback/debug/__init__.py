"""Watching kernels run, and finding what they do wrong."""

from ._checked import checked as checked
