"""The primitives and their rules: of ops, of callbacks, of taps."""

from . import _checkify, _conditions, _jax_code, _op_call, _product, _python_call, _tap, _taylor
from ._batching import VMAP_METHODS as VMAP_METHODS, batch as batch, mapped_first as mapped_first
from ._cudnn import (
    CUDNN_TARGETS as CUDNN_TARGETS,
    cudnn_attention as cudnn_attention,
    cudnn_attention_backward as cudnn_attention_backward,
    why_no_cudnn as why_no_cudnn,
)
from ._eager import check_devices as check_devices, platform_of as platform_of
from ._inline import inline as inline
from ._op_call import (
    PLATFORMS as PLATFORMS,
    call_of as call_of,
    of_one as of_one,
    op_call as op_call,
    op_call_p as op_call_p,
    transpose as transpose,
)
from ._matrix_product import (
    fewest_lines as fewest_lines,
    has_tiles as has_tiles,
    multiplies_faster as multiplies_faster,
)
from ._product import product as product
from ._refs import eval_shape as eval_shape, without_refs as without_refs
from ._python_call import (
    effectful_call_p as effectful_call_p,
    python_call as python_call,
    python_call_p as python_call_p,
)
from ._tap import Tap as Tap, tap as tap, tap_p as tap_p


_conditions.register()
_python_call.register()
_op_call.register()
_jax_code.register()
_product.register()
_tap.register()
_taylor.register()
_checkify.register()
