"""The effects of a kernel that must run even when nobody uses what it returns."""

# `jax._src.effects`: JAX has no public way to say where an effect of one's own is allowed. Without these registrations
# an effectful call is refused inside control flow, `jax.checkpoint` and custom derivatives.
# Noticed by: tests/xla/test_private_jax.py.
from jax._src import effects as _effects
from jax.extend.core import Effect


class _Effect(Effect):
    """Equal to others of its class: an exported program has the name of the class, and its loader makes another one."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class KernelEffect(_Effect):
    """Unordered. It keeps a call from being removed, merged with its equal, or hoisted out of a loop."""

    def __str__(self) -> str:
        return "KernelEffect"


class OrderedKernelEffect(_Effect):
    """Calls with it run one after the other, in the order of the program, and of the programs that a thread starts."""

    def __str__(self) -> str:
        return "OrderedKernelEffect"


kernel_effect: KernelEffect = KernelEffect()
ordered_kernel_effect: OrderedKernelEffect = OrderedKernelEffect()

for effect in (KernelEffect, OrderedKernelEffect):
    for allowed in (
        _effects.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.remat_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
    ):
        allowed.add_type(effect)
    # JAX 0.11 and later: what a partially evaluated function (grad of a scan) must keep.
    if hasattr(_effects, "partial_eval_kept_effects"):
        _effects.partial_eval_kept_effects.add_type(effect)

# JAX hands tokens to those that are ordered. On several devices, each device has an order of its own.
_effects.ordered_effects.add_type(OrderedKernelEffect)
_effects.shardable_ordered_effects.add_type(OrderedKernelEffect)
