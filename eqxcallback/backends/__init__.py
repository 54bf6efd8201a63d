"""How a kernel becomes runnable on a platform. One file for each technology."""

from ._available import available_backends as available_backends
from ._implementation import Implementation as Implementation
from ._prepare import prepare as prepare
