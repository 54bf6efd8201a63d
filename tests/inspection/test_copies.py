"""In place or copied, as `eqxcallback.inspect` says, against the addresses that kernels really got."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .layers import AddOne


add_one = AddOne()


def fresh():
    return jnp.zeros((8, 2)) + 1


def aliases(fn, *args, **options):
    return [(alias.state, alias.reason) for call in eqxc.inspect(fn, *args, **options).calls for alias in call.in_place]


def written(fn, *args):
    """The addresses that kernels wrote to."""
    add_one.addresses.clear()
    jax.block_until_ready(fn(*args))
    return list(add_one.addresses)


def keep(x):
    return add_one(x), x


# A program of one array, and what becomes of the array.
PROGRAMS = {
    "not donated": (jax.jit(add_one), "copied", "not donated"),
    "donated": (jax.jit(add_one, donate_argnums=0), "in place", ""),
    "filter_jit": (eqx.filter_jit(add_one), "copied", "not donated"),
    "filter_jit donated": (eqx.filter_jit(lambda x: add_one(x), donate="all"), "in place", ""),
    "in a branch": (
        jax.jit(lambda x: jax.lax.cond(x.sum() > 0, add_one, lambda x: x * 2, x), donate_argnums=0),
        "in place",
        "",
    ),
    "in a branch, not donated": (
        jax.jit(lambda x: jax.lax.cond(x.sum() > 0, add_one, lambda x: x * 2, x)),
        "copied",
        "not donated",
    ),
    "reshaped": (jax.jit(lambda x: add_one(x.reshape(16)).reshape(8, 2), donate_argnums=0), "copied", "XLA's choice"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_against_addresses(name):
    program, state, reason = PROGRAMS[name]
    assert aliases(program, fresh()) == [(state, reason)]
    x = fresh()
    before = x.unsafe_buffer_pointer()
    (address,) = written(program, x)
    assert (address == before) == (state == "in place")


def test_live_later():
    """The address says nothing here: XLA may move the old value away, and copy it back for the kernel."""
    for program in (lambda x: (add_one(x), x.sum(), x * 2), keep):
        assert aliases(jax.jit(program, donate_argnums=0), fresh()) == [("copied", "live later")]


def test_a_large_array():
    assert aliases(add_one, jnp.ones((2048, 1024))) == [("copied", "not donated")]


def test_a_chain_is_copied_once():
    def chain(x):
        return add_one(add_one(add_one(x)))

    assert aliases(chain, fresh()) == [("copied", "not donated"), ("in place", ""), ("in place", "")]
    assert len(set(written(jax.jit(chain), fresh()))) == 1


def test_what_the_program_makes_is_its_own():
    assert aliases(lambda x: add_one(x * 2), fresh()) == [("in place", "")]
    assert aliases(lambda: add_one(jnp.zeros((8, 2)))) == [("in place", "")]


def test_constants_are_copied():
    constant = np.asarray([3, 1, 2], np.float32)
    assert aliases(lambda: add_one(jnp.asarray(constant))) == [("copied", "a constant")]


def test_a_scan_carry():
    def loop(x):
        return jax.lax.scan(lambda c, _: (add_one(c), None), x, length=4)[0]

    assert aliases(jax.jit(loop, donate_argnums=0), fresh()) == [("in place", "")]
    assert aliases(loop, fresh()) == [("in place", "copied once, before the loop: not donated")]
    for program in (jax.jit(loop), jax.jit(loop, donate_argnums=0)):
        assert len(set(written(program, fresh()))) == 1


def test_a_while_loop():
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, add_one, x), donate_argnums=0)
    assert aliases(loop, fresh()) == [("in place", "")]


def test_a_carry_that_is_needed_is_copied_each_time():
    stacked = jax.jit(lambda x: jax.lax.scan(lambda c, _: (add_one(c), c), x, length=4), donate_argnums=0)
    assert aliases(stacked, fresh()) == [("copied", "live later")]
    unrolled = jax.jit(lambda x: jax.lax.scan(lambda c, _: (add_one(c), c), x, length=4, unroll=2), donate_argnums=0)
    (state,) = aliases(unrolled, fresh())
    assert state[0] == "copied"


def test_carries_that_are_swapped():
    def body(carry, _):
        a, b = carry
        return (add_one(b), a), None

    swap = jax.jit(lambda a, b: jax.lax.scan(body, (a, b), length=4)[0], donate_argnums=(0, 1))
    assert aliases(swap, fresh(), fresh() * 2) == [("copied", "XLA's choice")]


def test_several_calls_of_one_type():
    """Told apart by their order. JAX gives the memory of a donated argument to the first result of its type."""

    def step(x, y):
        return add_one(x), add_one(y)

    x, y = fresh(), fresh() * 2
    before = x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer()
    program = jax.jit(step, donate_argnums=0)
    assert aliases(program, x, y) == [("in place", ""), ("copied", "not donated")]
    addresses = written(program, x, y)
    assert before[0] in addresses
    assert before[1] not in addresses
    x, y = fresh(), fresh() * 2
    before = x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer()
    program = jax.jit(step, donate_argnums=1)
    assert aliases(program, x, y) == [("copied", "not donated"), ("copied", "XLA's choice")]
    assert not set(before) & set(written(program, x, y))


def test_native_calls_in_scopes():
    def step(cache, other):
        with jax.named_scope("first"):
            cache = ops.cache_append(cache, jnp.ones((1, 2)), 0)
        with jax.named_scope("second"):
            other = ops.cache_append(other, jnp.ones((1, 2)), 0)
        return cache, other

    report = eqxc.inspect(jax.jit(step, donate_argnums=0), fresh(), fresh() * 2)
    assert [call.path for call in report.calls] == ["jit(step)/first/cache_append", "jit(step)/second/cache_append"]
    assert [call.in_place[0].state for call in report.calls] == ["in place", "copied"]


def test_vmap():
    def step(x, shared):
        return jax.vmap(add_one)(x), jax.vmap(lambda x: add_one(x + shared))(x)

    assert aliases(step, fresh(), jnp.ones(2)) == [("copied", "not donated"), ("in place", "")]


def test_sharded(mesh):
    x = jax.device_put(fresh(), jax.NamedSharding(mesh, jax.P("d")))
    assert aliases(jax.jit(jax.vmap(add_one), donate_argnums=0), x) == [("in place", "")]
    per_device = jax.shard_map(add_one, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    assert aliases(per_device, x) == [("copied", "not donated")]
    assert aliases(jax.jit(per_device, donate_argnums=0), x) == [("in place", "")]


def test_without_a_device_donation_is_known(without_plugin):
    def step(x, y):
        return add_one(x), add_one(y), add_one(x * 2)

    program = jax.jit(step, donate_argnums=0)
    assert aliases(program, fresh(), fresh(), platform="cuda") == [
        (None, "donated"),
        (None, "not donated"),
        (None, ""),
    ]


def test_without_a_device_static_arguments_do_not_count(without_plugin):
    program = jax.jit(lambda n, x, y: (add_one(x), add_one(y)), static_argnums=0, donate_argnums=2)
    assert aliases(program, "static", fresh(), fresh(), platform="cuda") == [(None, "not donated"), (None, "donated")]


class Block(eqx.Module):
    norm: eqxc.nn.RMSNorm
    project: eqx.nn.Linear

    def decode(self, x, cache):
        k = self.project(self.norm(x)).reshape(1, 2, 4)
        cache = cache.append(k, k)
        return cache.attend(k[0]).reshape(8), cache


@pytest.mark.parametrize(
    ("jit", "state", "reason"),
    [(eqx.filter_jit(donate="all"), "in place", ""), (eqx.filter_jit, "copied", "not donated")],
)
def test_a_decode_step(jit, state, reason):
    block = Block(eqxc.nn.RMSNorm(8), eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    report = eqxc.inspect(jit(lambda cache, x: block.decode(x, cache)), eqxc.nn.KVCache(16, 2, 4), jnp.ones(8))
    assert [call.op for call in report.calls] == ["rms_norm", "cache_append", "cache_append", "decode_attention"]
    assert report.calls[0].path.endswith("/eqxcallback.nn.RMSNorm/rms_norm")
    states = [(alias.state, alias.reason) for call in report.calls for alias in call.in_place]
    assert states == [(state, reason)] * 2
