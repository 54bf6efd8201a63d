"""The callees of programs, and how long they live: bodies, their handles, lowerings of kernels, registered handlers."""

from ..._ext import Buffer as Buffer, ExecutionContext as ExecutionContext
from . import _failures, _portable, _targets
from ._body import CallSpec as CallSpec, FlatBody as FlatBody, PythonBody as PythonBody
from ._failures import unwritten_text as unwritten_text
from ._handles import EagerState as EagerState, eager_state as eager_state, handle_for as handle_for
from ._kernel_handle import KernelHandle as KernelHandle, kernel_handle as kernel_handle, python_handle as python_handle
from ._libraries import (
    LibraryFunction as LibraryFunction,
    register_c_function as register_c_function,
    headers as headers,
    library_function as library_function,
    target_for_each as target_for_each,
    why_no_c_functions as why_no_c_functions,
)
from ._lowering import (
    JaxLowering as JaxLowering,
    LaunchLowering as LaunchLowering,
    NativeLowering as NativeLowering,
    Lowering as Lowering,
    PythonLowering as PythonLowering,
    Run as Run,
    TypedLowering as TypedLowering,
)
from ._ownership import own as own
from ._portable import (
    import_exported as import_exported,
    is_exported as is_exported,
    portable_attributes as portable_attributes,
)
from ._targets import (
    CPU_OPS as CPU_OPS,
    LAUNCH as LAUNCH,
    LAUNCH_CAPTURED as LAUNCH_CAPTURED,
    PYTHON as PYTHON,
    PYTHON_CAPTURED as PYTHON_CAPTURED,
    PYTHON_EAGER as PYTHON_EAGER,
    PYTHON_PLATFORMS as PYTHON_PLATFORMS,
    compute_capabilities as compute_capabilities,
    device_text as device_text,
    host_calls as host_calls,
    is_registered as is_registered,
    launch_platforms as launch_platforms,
    launch_with as launch_with,
    register_handler as register_handler,
    target_names as target_names,
)
from ._tvm_ffi import load_tvm_ffi as load_tvm_ffi, register_tvm_ffi_function as register_tvm_ffi_function


_failures.register()
_portable.register()
_targets.register()
