"""The only room that touches JAX's extension points: primitives, lowering, registration, version differences."""

from ._attributes import attributes as attributes
from ._avals import (
    KERNEL_DTYPES as KERNEL_DTYPES,
    dtype_problem as dtype_problem,
    result_aval as result_aval,
    vary_like as vary_like,
)
from ._barrier import wait_for_effects as wait_for_effects
from ._batching import VMAP_METHODS as VMAP_METHODS, batch as batch, mapped_first as mapped_first
from ._body import CallSpec as CallSpec, FlatBody as FlatBody, PythonBody as PythonBody
from ._deviceless import (
    Compiled as Compiled,
    DevicelessError as DevicelessError,
    compile_deviceless as compile_deviceless,
    compile_with_plan as compile_with_plan,
    deviceless_unavailable as deviceless_unavailable,
)
from ._handles import EagerState as EagerState, eager_state as eager_state
from ._inline import inline as inline
from ._kernel_handle import KernelHandle as KernelHandle, kernel_handle as kernel_handle, python_handle as python_handle
from ._op_call import PLATFORMS as PLATFORMS, op_call as op_call, transpose as transpose
from ._plan import (
    LaunchPlan as LaunchPlan,
    NativePlan as NativePlan,
    Plan as Plan,
    PythonPlan as PythonPlan,
    Run as Run,
    TypedPlan as TypedPlan,
)
from ._python_call import python_call as python_call
from ._sharding import Dims as Dims, Factors as Factors
from ._staging import is_outermost as is_outermost
from ._tap import Tap as Tap, tap as tap
from ._targets import (
    CPU_OPS as CPU_OPS,
    LAUNCH as LAUNCH,
    LAUNCH_CAPTURED as LAUNCH_CAPTURED,
    PYTHON_PLATFORMS as PYTHON_PLATFORMS,
    compute_capabilities as compute_capabilities,
    host_calls as host_calls,
    launch_platforms as launch_platforms,
    launch_with as launch_with,
    library_handler as library_handler,
    register_handler as register_handler,
    target_names as target_names,
)
from ._walk import (
    CallSite as CallSite,
    call_sites as call_sites,
    only_jit as only_jit,
    platform_in_use as platform_in_use,
    python_target as python_target,
)
from . import _failures, _op_call, _portable, _python_call, _tap, _targets


_failures.register()
_portable.register()
_targets.register()
_python_call.register()
_op_call.register()
_tap.register()
