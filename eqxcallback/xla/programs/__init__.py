"""Questions about whole programs: their calls, XLA's plan of them, and when they are done."""

from ._barrier import wait_for_effects as wait_for_effects
from ._deviceless import (
    Compiled as Compiled,
    DevicelessError as DevicelessError,
    compile_deviceless as compile_deviceless,
    compile_with_plan as compile_with_plan,
    deviceless_unavailable as deviceless_unavailable,
)
from ._exported import bring_back as bring_back
from ._operations import count_operations as count_operations
from ._staging import is_outermost as is_outermost
from ._walk import (
    CallSite as CallSite,
    call_sites as call_sites,
    calls_kernels as calls_kernels,
    only_jit as only_jit,
    platform_in_use as platform_in_use,
    python_target as python_target,
)
