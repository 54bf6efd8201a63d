"""List the external calls of a program, and what becomes of them."""

from ._inspect import inspect as inspect
from ._report import Alias as Alias, ExternalCall as ExternalCall, Inspection as Inspection
