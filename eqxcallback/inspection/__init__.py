"""List the external calls of a program, and what becomes of them."""

from ._inspect import inspect as inspect
from ._profile import Limits as Limits, Profile as Profile, ProfileRow as ProfileRow, Span as Span
from ._report import Alias as Alias, ExternalCall as ExternalCall, Inspection as Inspection
