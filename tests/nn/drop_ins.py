"""The layers that replace Equinox's, with the arguments of a call of each."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import nn


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """`nn.name(*args, **options)` is called with arrays of `shapes`; `None` is an index."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    shapes: tuple[Any, ...]
    keyed: bool = False  # the constructor takes a key
    pair: bool = False  # the last two arrays are one argument

    @functools.cache  # noqa: B019 - a constructor compiles much, and there are few cases
    def make(self, module: Any = nn, dtype: Any = None, **more: Any) -> Any:
        options = {**self.options, **more, **({"key": jax.random.key(1)} if self.keyed else {})}
        if dtype is not None and options.get("weight") is None:
            options["dtype"] = dtype
        return getattr(module, self.name)(*self.args, **options)

    def inputs(self, dtype: Any = jnp.float32, batch: tuple[int, ...] = ()) -> tuple[Any, ...]:
        rng = np.random.default_rng(len(self.shapes))
        arrays = [
            jnp.asarray(rng.integers(-2, 5, batch))
            if shape is None
            else jnp.asarray(rng.standard_normal((*batch, *shape)).astype(dtype))
            for shape in self.shapes
        ]
        return (*arrays[:-2], tuple(arrays[-2:])) if self.pair else tuple(arrays)

    def __str__(self) -> str:
        options = ", ".join(
            [
                *(_name(value) for value in self.args),
                *(f"{key}={_name(value)}" for key, value in self.options.items()),
            ]
        )
        return f"{self.name}({options})"


def _name(value: Any) -> str:
    if isinstance(value, functools.partial):  # whose text has an address
        return f"{_name(value.func)}({value.keywords})"
    return str(getattr(value, "__name__", value))


def _case(name: str, *args: Any, of: tuple[Any, ...], pair: bool = False, **options: Any) -> Case:
    keyed = name in ("Linear", "MLP", "Embedding", "GRUCell", "LSTMCell")
    return Case(name, args, options, of, keyed, pair)


# The first one of each layer is what the slower tests take.
CASES = [
    _case("LayerNorm", (3, 5), of=((3, 5),)),
    _case("LayerNorm", 7, eps=0.5, of=((7,),)),
    _case("LayerNorm", 7, use_weight=False, of=((7,),)),
    _case("LayerNorm", [7], use_bias=False, of=((7,),)),
    _case("LayerNorm", (), of=((),)),
    _case("RMSNorm", (3, 5), of=((3, 5),)),
    _case("RMSNorm", 64, eps=0.5, of=((64,),)),
    _case("RMSNorm", 7, use_weight=False, of=((7,),)),
    _case("RMSNorm", [7], use_bias=False, of=((7,),)),
    _case("RMSNorm", 7, use_weight=False, use_bias=False, of=((7,),)),
    _case("GroupNorm", 2, 6, of=((6, 3, 5),)),
    _case("GroupNorm", 3, 6, eps=0.5, of=((6,),)),
    _case("GroupNorm", 3, channelwise_affine=False, of=((6, 5),)),
    _case("GroupNorm", 1, 4, channelwise_affine=False, of=((4, 0, 2),)),
    _case("Linear", 3, 5, of=((3,),)),
    _case("Linear", 3, 5, use_bias=False, of=((3,),)),
    _case("Linear", "scalar", 5, of=((),)),
    _case("Linear", 3, "scalar", of=((3,),)),
    _case("Linear", "scalar", "scalar", use_bias=False, of=((),)),
    _case("Linear", 0, 5, of=((0,),)),
    _case("Linear", 3, 0, of=((3,),)),
    _case("MLP", 3, 2, 5, 2, of=((3,),)),
    _case("MLP", 3, 2, 5, 0, of=((3,),)),
    _case("MLP", 3, 2, 5, 1, scan=True, of=((3,),)),
    _case("MLP", "scalar", "scalar", 4, 3, scan=True, of=((),)),
    _case("MLP", 3, 2, 4, 2, jnp.tanh, jnp.sin, use_bias=False, use_final_bias=False, of=((3,),)),
    _case("MLP", 3, 2, 4, 2, jax.nn.gelu, of=((3,),)),
    _case("MLP", 3, 2, 4, 2, functools.partial(jax.nn.gelu, approximate=False), jax.nn.gelu, scan=True, of=((3,),)),
    _case("MLP", "scalar", "scalar", 4, 1, jax.nn.gelu, jax.nn.gelu, of=((),)),
    _case("MLP", 3, 2, 4, 2, eqx.nn.PReLU(), eqx.nn.PReLU(), of=((3,),)),
    _case("MLP", 3, 2, 4, 3, eqx.nn.PReLU(), scan=True, of=((3,),)),
    _case("Embedding", 5, 3, of=(None,)),
    _case("Embedding", weight=jnp.arange(12.0).reshape(4, 3), of=(None,)),
    _case("RotaryPositionalEmbedding", 6, of=((5, 6),)),
    _case("RotaryPositionalEmbedding", 0, of=((5, 0),)),
    _case("RotaryPositionalEmbedding", 4, of=((0, 4),)),
    _case("GRUCell", 3, 5, of=((3,), (5,))),
    _case("GRUCell", 3, 5, use_bias=False, of=((3,), (5,))),
    _case("LSTMCell", 3, 5, of=((3,), (5,), (5,)), pair=True),
    _case("LSTMCell", 3, 5, use_bias=False, of=((3,), (5,), (5,)), pair=True),
]
ONE_OF_EACH = list({case.name: case for case in reversed(CASES)}.values())[::-1]


def randomized(layer: Any, seed: int = 0) -> Any:
    """With other parameters: those of a new norm are ones and zeros."""

    def random(x: Any) -> Any:
        values = np.random.default_rng((seed, *x.shape)).standard_normal(x.shape)
        return jnp.asarray(values.astype(x.dtype))

    return jax.tree.map(lambda x: random(x) if eqx.is_inexact_array(x) else x, layer)
