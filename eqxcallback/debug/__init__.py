"""Watching kernels run, and finding what they do wrong."""

from ._barrier import barrier_wait as barrier_wait, shutdown as shutdown
from ._call import call as call
from ._checked import checked as checked
from ._failures import CallbackException as CallbackException
from ._inline import inline as inline
from ._print import Printer as Printer, Stream as Stream, print as print
from ._tap import tap as tap, tap_cotangents as tap_cotangents, tap_tangents as tap_tangents
