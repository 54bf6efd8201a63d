"""Facts that XLA is told about a call's operands: abstract values, layouts, attributes, effects, and what may be split."""

from ._attributes import attributes as attributes
from ._avals import (
    KERNEL_DTYPES as KERNEL_DTYPES,
    dtype_problem as dtype_problem,
    first_axis as first_axis,
    memory_aval as memory_aval,
    on_current_mesh as on_current_mesh,
    result_aval as result_aval,
    split_alike as split_alike,
    vary_alike as vary_alike,
    vary_like as vary_like,
    with_first_axis as with_first_axis,
)
from ._effects import kernel_effect as kernel_effect, ordered_kernel_effect as ordered_kernel_effect
from ._call_options import CallOptions as CallOptions
from ._layouts import (
    full_layouts as full_layouts,
    layouts_attribute as layouts_attribute,
    minor_to_major as minor_to_major,
)
from ._sharding import (
    Dims as Dims,
    Factors as Factors,
    even as even,
    named as named,
    no_mesh as no_mesh,
    split as split,
    summed_axes as summed_axes,
)
