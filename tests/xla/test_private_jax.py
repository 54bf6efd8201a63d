"""Parts of JAX that we use and that are not public. If one of these fails, a new JAX has moved it: mend eqxcallback/xla/."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.xla.handles import _ownership, _targets
from eqxcallback.xla.types import _effects


def test_effect_sets():
    from jax._src import effects

    assert effects.ordered_effects.contains(_effects.ordered_kernel_effect)
    assert not effects.ordered_effects.contains(_effects.kernel_effect)
    assert effects.shardable_ordered_effects.contains(_effects.ordered_kernel_effect)
    for name in (
        "lowerable_effects",
        "control_flow_allowed_effects",
        "remat_allowed_effects",
        "custom_derivatives_allowed_effects",
    ):
        assert getattr(effects, name).contains(_effects.kernel_effect), name
        assert getattr(effects, name).contains(_effects.ordered_kernel_effect), name


def test_an_effect_without_the_private_sets_is_refused():
    """Why we need them: the public API alone does not let an effect through a loop."""
    from jax.extend.core import Effect, Primitive

    class Unknown(Effect):
        pass

    effectful_p = Primitive("effectful")
    effectful_p.multiple_results = True
    effectful_p.def_effectful_abstract_eval(lambda x: ([x], {Unknown()}))
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (effectful_p.bind(c)[0], None), x, length=2))(1.0)


def test_jaxlib_has_a_callback_handler():
    assert "capsule" in repr(_targets.jax_handler())


def test_partitions_are_lowered_into_a_module_of_that_name(mesh, monkeypatch):
    """`own` tells them by it. Elsewhere the program owns its callbacks."""
    from jax.experimental.custom_partitioning import custom_partitioning

    kept = []
    monkeypatch.setattr(_ownership, "keep_for_ever", kept.append)

    def kernel(ctx, out, x):
        out.write(x)

    def local(x):
        return eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = jax.device_put(jnp.zeros((8, 5)), jax.NamedSharding(mesh, jax.P("d")))
    jax.jit(local).lower(jnp.zeros(3)).compile()
    assert kept == []
    op = custom_partitioning(local)
    op.def_partition(
        partition=lambda mesh, args, result: (mesh, local, result.sharding, (args[0].sharding,)),
        sharding_rule="b d -> b d",
    )
    jax.jit(op).lower(x).compile()
    assert len(kept) == 1


def test_a_program_owns_its_host_callbacks():
    """`ModuleContext.add_host_callback`, and the index that jaxlib's handler finds it by."""
    f = eqxc.buffer_callback(lambda ctx, out, x: None, jax.ShapeDtypeStruct((3,), jnp.float32))
    g = eqxc.buffer_callback(lambda ctx, out, x: None, jax.ShapeDtypeStruct((3,), jnp.float32))
    text = jax.jit(lambda x: g(f(f(x)))).lower(jnp.zeros(3)).as_text()
    indices = [line.split("host_callback = ")[1].split(" ")[0] for line in text.splitlines() if "host_callback" in line]
    assert indices == ["0", "0", "1"]


def test_partitioned_calls_have_a_name(mesh):
    """`_custom_partitioning._sharding_callbacks`, in which JAX finds them by what stands in the program; what `decode_all` sets
    of its entries; and the devices, which lowering knows of the primitives that ask for them."""
    from jax._src import custom_partitioning, sharding_impls

    class Double(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(np.asarray(x) * np.float32(2))

        def out_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

    x = jax.device_put(jnp.ones((8, 5)), jax.NamedSharding(mesh, jax.P("d")))
    lowered = jax.jit(jax.vmap(Double())).lower(x)
    (name,) = set(re.findall(r'backend_config = "(\w+)"', lowered.as_text()))
    info = custom_partitioning._sharding_callbacks[name.encode()]
    assert info.to_mesh_pspec_sharding.__module__ == info.partition.__module__.replace("_partition", "_decode")
    assert isinstance(info.mesh, jax.sharding.Mesh)
    assert info.module_context.platforms
    sharding = x.sharding._to_xla_hlo_sharding(2)
    assert sharding_impls.parse_flatten_op_sharding(sharding, mesh)[0] == jax.P("d")
    assert sharding_impls.GSPMDSharding(mesh._flat_devices_tuple, sharding).is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(lowered.compile()(x), np.full((8, 5), 2))


def test_tokens_order_calls():
    """`jax._src.core.abstract_token`, the type of what the calls of an ordered effect hand on."""
    f = lambda x: eqxc.debug.tap(lambda x, _: None, eqxc.debug.tap(lambda x, _: None, x, ordered=True), ordered=True)
    text = jax.jit(f).lower(jnp.zeros(3)).as_text()
    assert text.count("(!stablehlo.token, tensor<3xf32>) -> !stablehlo.token") == 2


def test_programs_of_a_thread_leave_tokens():
    """`dispatch.runtime_tokens`, which a barrier with a timeout waits for."""
    from jax._src import dispatch

    jax.effects_barrier()
    jax.jit(lambda x: eqxc.debug.tap(lambda x, _: None, x, ordered=True))(1.0)
    assert dispatch.runtime_tokens.current_tokens
    jax.jit(lambda x: eqxc.debug.tap(lambda x, _: None, x))(1.0)
    tokens = dispatch.runtime_tokens.output_runtime_tokens
    assert all(hasattr(token, "block_until_ready") for token in tokens.values())
    assert tokens
    eqxc.debug.barrier_wait(timeout=60)


def test_what_moves_values_out_of_a_scan():
    """`_scan_known_hoisting`, by whose name on the stack effects are kept in their loops."""
    from jax._src.lax.control_flow import loops

    assert callable(loops._scan_known_hoisting)


def test_loops_have_a_rule():
    """`_while_lowering`, which ours calls for all loops but those with effects in conditions that are mapped."""
    import inspect

    from jax._src.lax.control_flow import loops

    names = ["cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"]
    assert list(inspect.signature(loops._while_lowering).parameters) == ["ctx", "args", *names]


def test_jax_still_computes_a_condition_twice():
    """Why there is a rule of ours. Once JAX does better, it can go."""
    calls = []

    def count(x):
        return jax.lax.while_loop(lambda x: (jax.debug.callback(calls.append, x), x < 2)[1], lambda x: x + 1, x)

    jax.jit(jax.vmap(count))(jnp.arange(2))
    jax.effects_barrier()
    assert len(calls) > 2 * 3


def test_cudnn_attention():
    """`fused_attention_stablehlo._dot_product_attention_fwd_impl` and `_bwd_impl`. If they change, attention on a GPU goes on
    without cuDNN: mend eqxcallback/xla/calls/_cudnn.py."""
    from eqxcallback.xla.calls import _cudnn

    assert _cudnn._why_changed() is None
    x = jax.ShapeDtypeStruct((1, 40, 2, 64), jnp.bfloat16)

    def both(q, k, v):
        options = {"scale": 1.0, "causal": True, "window": 3}
        out, lse = _cudnn.cudnn_attention(q, k, v, **options)
        return lse, _cudnn.cudnn_attention_backward(q, k, v, out, lse, out, **options)

    text = jax.jit(both).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert tuple(re.findall(r"custom_call @([\w$]+)", text)) == _cudnn.CUDNN_TARGETS


def test_refs_are_discharged():
    """`internal_mutable_array_effect`, which functions with Refs of their own have, and `discharge_state`, which removes both."""
    from eqxcallback.xla.calls import _refs

    def f(x):
        copy = jax.new_ref(x)
        jax.debug.print("{}", x)
        copy[...] *= 3
        return copy[...]

    (types, has_refs), (_, has_none) = _refs.eval_shape(f, jnp.float32(1)), _refs.eval_shape(jnp.sin, jnp.float32(1))
    assert (types.shape, types.dtype, has_refs, has_none) == ((), jnp.float32, True, False)
    jaxpr = jax.make_jaxpr(_refs.without_refs(f))(1.0)
    assert _refs._of_refs not in jaxpr.effects
    assert len(jaxpr.effects) == 1  # what is printed
