"""The backends: they make a kernel runnable on a platform. One file for each technology."""

from ._architecture import architecture as architecture, version_of as version_of
from ._available import (
    available_backends as available_backends,
    missing as missing,
    why_not_here as why_not_here,
)
from ._bound_kernel import BoundKernel as BoundKernel
from ._c import is_of_addresses as is_of_addresses
from ._cache import cache_folder as cache_folder, key_of as key_of, load as load, store as store
from ._description import description as description
from ._launched import Launched as Launched, launched as launched
from ._numba import load_code as load_code
from ._prepare import prepare as prepare, register_library as register_library
from ._resident import most_shared_bytes as most_shared_bytes
