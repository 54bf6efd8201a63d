"""`eqxcallback.compat.buffer_callback` in place of `jax.experimental.buffer_callback`.

JAX's own tests run through it with scripts/run_jax_tests, which needs a copy of JAX's repository. These are ours.
"""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import buffer_callback as theirs
from jaxtyping import Float, PyTree

import eqxcallback as eqxc
from eqxcallback.compat import buffer_callback as ours


X = jnp.arange(3.0)
F32 = jax.ShapeDtypeStruct((3,), jnp.float32)


def test_the_same_names_and_signature():
    names = {name for name in vars(theirs) if not name.startswith("_")}
    assert names <= set(vars(ours))
    parameters = inspect.signature(theirs.buffer_callback).parameters
    assert list(inspect.signature(ours.buffer_callback).parameters) == list(parameters)
    for name, parameter in inspect.signature(ours.buffer_callback).parameters.items():
        assert parameter.kind == parameters[name].kind
        assert parameter.default == parameters[name].default


def test_the_public_one_has_the_same_signature():
    parameters = inspect.signature(theirs.buffer_callback).parameters
    ours = inspect.signature(eqxc.buffer_callback).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in parameters.values()
    ]


def test_the_same_stages():
    def members(stage):
        return {name: member.value for name, member in stage.__members__.items()}

    assert members(eqxc.ExecutionStage) == members(theirs.ExecutionStage)
    assert ours.ExecutionStage is eqxc.ExecutionStage


@pytest.mark.parametrize("module", [theirs, ours], ids=["jax", "eqxcallback"])
def test_both_do_the_same(module):
    def callback(ctx, out, x):
        assert isinstance(ctx, module.ExecutionContext)
        assert isinstance(x, module.Buffer)
        assert ctx.stage == module.ExecutionStage.EXECUTE
        with pytest.raises(jax.errors.JaxRuntimeError, match="XLA FFI GPU context is not available"):
            _ = ctx.stream
        assert (x.writeable, out.writeable) == (False, True)
        np.asarray(out)[...] = np.asarray(x) + 1

    f = module.buffer_callback(callback, F32, vmap_method="broadcast_all")
    np.testing.assert_array_equal(f(X), X + 1)
    np.testing.assert_array_equal(jax.jit(f)(X), X + 1)


def test_errors_name_the_users_function():
    def mine(ctx, out, x):
        raise ValueError("no")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"mine failed"):
        ours.buffer_callback(mine, F32)(X)
    with pytest.raises(TypeError, match=r"mine\): the callback's signature is \(ctx, out, x\)"):
        ours.buffer_callback(mine, F32)()
    with pytest.raises(TypeError, match="expected a function"):
        ours.buffer_callback(3, F32)  # pyright: ignore[reportArgumentType]


def test_methods_of_a_module_are_one_program():
    class Scale(eqx.Module):
        factor: jax.Array

        def kernel(self, ctx, out, x):
            out.write(np.asarray(x) * np.asarray(self.factor))

    module = Scale(jnp.float32(3.0))

    def program(x):
        return ours.buffer_callback(module.kernel, F32)(ours.buffer_callback(module.kernel, F32)(x))

    text = jax.jit(program).lower(X).as_text()
    assert len({line.split("key = ")[1].split(" ")[0] for line in text.splitlines() if "key = " in line}) == 1
    np.testing.assert_array_equal(program(X), X * 9)


def test_equal_callbacks_are_one_program():
    def mine(ctx, out, x):
        out.write(x)

    def text():
        return jax.jit(lambda x: ours.buffer_callback(mine, F32)(ours.buffer_callback(mine, F32)(x))).lower(X).as_text()

    keys = {line.split("key = ")[1].split(" ")[0] for line in text().splitlines() if "key = " in line}
    assert len(keys) == 1


def annotated(ctx, out: PyTree[np.ndarray], x: Float[np.ndarray, "..."]):
    out.write(np.asarray(x) + 1)


def test_export():
    """Annotations need not be importable."""
    exported = eqxc.export(jax.jit(ours.buffer_callback(annotated, F32)))(X)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(X), X + 1)
