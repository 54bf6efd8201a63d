"""tokamax's kernels as peers, where it is installed: `pip install tokamax`. No other kernels of it stand for ours."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._rows import Setting


NAME = "tokamax"
# Without a GPU, where every path shall run once.
_ON_A_CPU = "xla"


def is_installed() -> bool:
    return importlib.util.find_spec(NAME) is not None


def attention(setting: Setting, causal: bool) -> dict[str, Callable[..., jax.Array]]:
    """By name; none where it is not installed. One whose kernels do not take the call is left out of the race and says why."""
    return _named(setting, "dot_product_attention", ("mosaic", "triton"), is_causal=causal)


def gated_linear(setting: Setting) -> dict[str, Callable[..., jax.Array]]:
    """Return that of rows and two weights: `silu(x @ gate) * (x @ up)`."""
    theirs = _named(setting, "gated_linear_unit", ("mosaic", "triton"), activation=jax.nn.silu)
    return {name: lambda x, gate, up, f=f: f(x, (gate, up)) for name, f in theirs.items()}


def norms(setting: Setting) -> Mapping[str, dict[str, Callable[..., jax.Array]]]:
    """For each norm that it has."""
    rms, layer = (
        _named(setting, "layer_norm", ("triton",), epsilon=1e-5, subtract_mean=subtract) for subtract in (False, True)
    )
    return {
        "rms_norm": {name: lambda x, weight, f=f: f(x, weight, None) for name, f in rms.items()},
        "layer_norm": layer,
    }


def _named(
    setting: Setting, function: str, implementations: tuple[str, ...], **options: Any
) -> dict[str, Callable[..., jax.Array]]:
    if not is_installed():
        return {}
    if setting.tiny:
        return {f"{NAME}: {_ON_A_CPU}": functools.partial(_call, function, _ON_A_CPU, options)}
    # Each by itself: of several, tokamax takes the first that it can.
    return {f"{NAME}: {kind}": functools.partial(_call, function, kind, options) for kind in implementations}


def _call(function: str, implementation: str, options: Mapping[str, Any], *args: Any) -> jax.Array:
    return getattr(_tokamax(), function)(*args, implementation=implementation, **options)


@functools.cache
def _tokamax() -> Any:
    tokamax = importlib.import_module(NAME)
    # Its configuration is absl's flags, which it would read from the command line of this process.
    importlib.import_module("absl.flags").FLAGS([NAME])
    return tokamax
