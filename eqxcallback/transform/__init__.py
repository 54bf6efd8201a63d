"""The rules of an op under JAX's transformations. Knows no platform."""

from ..backends import (
    architecture as architecture,
    most_shared_bytes as most_shared_bytes,
    version_of as version_of,
)
from ..xla import (
    cudnn_attention as cudnn_attention,
    cudnn_attention_backward as cudnn_attention_backward,
    fewest_lines as fewest_lines,
    has_tiles as has_tiles,
    multiplies_faster as multiplies_faster,
    product as product,
    why_no_cudnn as why_no_cudnn,
)
from ._axes import Axes as Axes
from ._batching import (
    DEFAULT_METHOD as DEFAULT_METHOD,
    METHODS as METHODS,
    REFERENCE as REFERENCE,
    why_no_threads as why_no_threads,
)
from ._bodies import Backward as Backward, Body as Body
from ._binder import Binder as Binder, Slots as Slots
from ._bound_op import BoundOp as BoundOp
from ._checkpoint_policy import save_only_these_kernels as save_only_these_kernels
from ._choice import (
    IMPLEMENTATIONS as IMPLEMENTATIONS,
    Implementation as Implementation,
    named_types as named_types,
)
from ._decorator import op as op
from ._forward_call import ForwardCall as ForwardCall
from ._jax_functions import jax_backward as jax_backward, jax_forward as jax_forward
from ._op import Op as Op
from ._options import Options as Options
from ._preference import Contest as Contest, store as store, trial as trial
from ._settings import Settings as Settings, settings as settings
from ._sharding import parse_sharding as parse_sharding
from ._structure import (
    Structure as Structure,
    called_with_a_buffer as called_with_a_buffer,
    check_typed as check_typed,
    is_array as is_array,
    typed as typed,
)
