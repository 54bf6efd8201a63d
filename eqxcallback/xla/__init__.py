"""The only room that touches JAX's extension points: primitives, lowering, registration, version differences."""

from ._batching import VMAP_METHODS as VMAP_METHODS
from ._body import CallSpec as CallSpec, EagerState as EagerState, PythonBody as PythonBody, eager_state as eager_state
from ._avals import result_aval as result_aval
from ._python_call import python_call as python_call
from . import _python_call, _targets


_targets.register()
_python_call.register()
