"""The only room that touches JAX's extension points: primitives, lowering, registration, version differences."""

from ._avals import result_aval as result_aval
from ._batching import VMAP_METHODS as VMAP_METHODS
from ._body import CallSpec as CallSpec, PythonBody as PythonBody
from ._handles import EagerState as EagerState, eager_state as eager_state
from ._python_call import python_call as python_call
from . import _failures, _python_call, _targets


_failures.register()
_targets.register()
_python_call.register()
