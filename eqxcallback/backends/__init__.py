"""How a kernel becomes runnable on a platform. One file for each technology."""

from ._implementation import Implementation as Implementation
from ._prepare import prepare as prepare
