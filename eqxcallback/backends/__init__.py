"""How a kernel becomes runnable on a platform: one file for each technology."""

from ._native import prepare as prepare
