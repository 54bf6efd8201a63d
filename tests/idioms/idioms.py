"""Idioms of JAX and Equinox around a function `f(x, w)`, each as a function of `f` that returns arrays."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P


X = jnp.array([0.3, -0.7, 1.2])
W = jnp.array([0.5, 1.1, -0.4])
DX = jnp.array([1.0, 0.5, -2.0])
ROWS = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
KEY = jax.random.key(0)


def total(f):
    return lambda x, w: (f(x, w) ** 2).sum()


def fresh(x):
    """For somebody who gives it away."""
    return jnp.array(x, copy=True)


def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def split(x):
    return jax.device_put(x, NamedSharding(mesh(), P("d", None)))


def jitted_parts(f):
    def outer(x, w):
        return jax.jit(f)(x, w) + jax.jit(f)(2 * x, w)

    return jax.jit(outer)(X, W)


def custom_jvp(f):
    @jax.custom_jvp
    def g(x):
        return f(x, W)

    g.defjvp(lambda primals, tangents: (g(*primals), 3 * f(primals[0], W) * tangents[0]))
    return jax.jvp(g, (X,), (DX,)), jax.grad(lambda x: g(x).sum())(X), jax.jacfwd(jax.vmap(g))(ROWS[:2])


def custom_vjp(f):
    @jax.custom_vjp
    def g(x, w):
        return f(x, w)

    g.defvjp(lambda x, w: (g(x, w), (x, w)), lambda kept, ct: (f(kept[0], ct), f(ct, kept[1])))
    return jax.grad(total(g), (0, 1))(X, W), jax.vmap(jax.grad(total(g)), (0, None))(ROWS, W)


def custom_vmap(f):
    @jax.custom_batching.custom_vmap
    def g(x):
        return f(x, W)

    @g.def_vmap
    def rule(size, in_batched, x):
        return f(x, jnp.broadcast_to(W, (size, 3))), True

    return jax.vmap(g)(ROWS)


def custom_gradient(f):
    def with_rule(x):
        y = f(x, W)
        return y, lambda ct: 2 * ct * y

    g: Any = jax.custom_gradient(with_rule)  # its type is that of `with_rule`, which returns more
    return jax.grad(lambda x: g(x).sum())(X)


def closure_convert(f):
    def g(w):
        converted, consts = jax.closure_convert(lambda x: f(x, w), X)
        return converted(X, *consts)

    return jax.jacrev(g)(W)


def scan(f):
    return lax.scan(lambda c, x: (f(c, W), f(x, c)), X, ROWS)


def grad_of_scan(f, **options):
    def loss(w):
        return lax.scan(lambda c, x: (f(c, w) + x, f(x, w)), X, ROWS, **options)[0].sum()

    return jax.grad(loss)(W)


def checkpointed_scan(f):
    step = jax.checkpoint(lambda c, x: (f(c, W) + x, None))
    return jax.grad(lambda x: lax.scan(step, x, ROWS)[0].sum())(X)


def while_loop(f):
    return lax.while_loop(lambda c: c[1] < 5, lambda c: (f(c[0], W), c[1] + 1), (X, 0))[0]


def vmap_of_while(f):
    return jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, c: f(c, W), x))(ROWS, jnp.arange(8))


def cond(f, x=X, take=True):
    return lax.cond(take, lambda x: f(x, W), lambda x: x, x)


def switch(f):
    branches = [lambda x: f(x, W), lambda x: f(W, x), lambda x: x]
    return [jax.jit(lambda i: lax.switch(i, branches, X))(i) for i in range(3)]


def spmd(f):
    with jax.set_mesh(mesh()):
        return jax.jit(jax.vmap(lambda x: f(x, W), spmd_axis_name="d"))(split(ROWS))


def shard_map(f, of=lambda f: f):
    g = jax.shard_map(lambda x: f(x, jnp.broadcast_to(W, x.shape)), mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
    return jax.jit(of(g))(ROWS)


def psum_in_shard_map(f):
    def g(x):
        return lax.psum(jax.vmap(f, (0, None))(x, W).sum(0), "d")

    return jax.shard_map(g, mesh=mesh(), in_specs=P("d"), out_specs=P())(ROWS)


def out_shardings(f):
    sharding = NamedSharding(mesh(), P("d", None))
    g = jax.jit(jax.vmap(f, (0, None)), in_shardings=(sharding, None), out_shardings=sharding)
    return g(split(ROWS), W)


def constrained(f):
    def g(x):
        y = jax.vmap(f, (0, None))(x, W)
        return lax.with_sharding_constraint(y, NamedSharding(mesh(), P("d", None)))

    return jax.jit(g)(ROWS)


def ahead_of_time(f):
    return jax.jit(f).trace(X, W).lower().compile()(X, W), jax.jit(f).lower(X, W).compile()(X, W)


def shapes(f):
    out = jax.eval_shape(f, X, W)
    jaxpr, shape = jax.make_jaxpr(f, return_shape=True)(X, W)
    assert (shape.shape, shape.dtype) == (out.shape, out.dtype)
    avals: Any = jaxpr.out_avals
    return jnp.ones(out.shape, out.dtype), [jnp.zeros(aval.shape, aval.dtype) for aval in avals]


def dtypes(f, dtype):
    return f(X.astype(dtype), W.astype(dtype)), jax.grad(total(f))(X.astype(dtype), W.astype(dtype))


def x64(f):
    with jax.enable_x64(True):
        x, w = np.array([0.3, -0.7, 1.2]), np.array([0.5, 1.1, -0.4])
        return f(x, w), jax.grad(total(f))(x, w), jax.vmap(f, (0, None))(np.stack([x, w]), w)


def under(context):
    def idiom(f):
        with context():
            return jax.jit(f)(X, W), jax.grad(total(f))(X, W)

    return idiom


class Model(eqx.Module):
    f: Any
    weight: jax.Array
    name: str = eqx.field(static=True, default="a model")

    def __call__(self, x, *, key=None):
        return self.f(x, self.weight)


def trained(f):
    @eqx.filter_jit(donate="all")
    def step(model, rows):
        loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(rows) ** 2).mean())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    model, loss = step(Model(f, fresh(W)), fresh(ROWS))
    for _ in range(2):
        model, loss = step(model, fresh(ROWS))
    return model.weight, loss


def filter_custom_jvp(f):
    @eqx.filter_custom_jvp
    def g(x):
        return f(x, W)

    g.def_jvp(lambda primals, tangents: (g(*primals), f(*primals, W) * tangents[0]))
    return jax.grad(lambda x: g(x).sum())(X)


def of_a_sequence(f):
    model = eqx.nn.Sequential([eqx.nn.Lambda(lambda x: f(x, W)), Model(f, W), eqx.nn.Lambda(jnp.tanh)])
    return jax.vmap(model)(ROWS)


def at_compile_time(f):
    def g(x):
        with jax.ensure_compile_time_eval():
            known = f(X, W)
        return known + x

    return jax.jit(g)(X)


def remat(policy):
    return lambda f: jax.jit(jax.grad(jax.checkpoint(total(lambda x, w: f(f(x, w), w)), policy=policy)))(X, W)


IDIOMS = {
    # jit
    "call": lambda f: f(X, W),
    "jit": lambda f: jax.jit(f)(X, W),
    "jit of jit": jitted_parts,
    "jit, inlined": lambda f: jax.jit(jax.jit(f, inline=True))(X, W),
    "static arguments": lambda f: jax.jit(lambda n, x, w: f(n * x, w), static_argnums=0)(2, X, W),
    "static names": lambda f: jax.jit(lambda x, *, n: f(n * x, W), static_argnames="n")(X, n=2),
    "donated": lambda f: jax.jit(f, donate_argnums=0)(fresh(X), W),
    "ahead of time": ahead_of_time,
    "eval_shape and make_jaxpr": shapes,
    "closed over": lambda f: jax.jit(lambda: f(X, W))(),
    "partial": lambda f: jax.jit(functools.partial(f, X))(W),
    "Partial": lambda f: jax.jit(lambda g, w: g(w))(jax.tree_util.Partial(f, X), W),
    "trees": lambda f: jax.jit(lambda t: jax.tree.map(lambda x: f(x, W), t))({"a": X, "b": [W, (ROWS[0], None)]}),
    "tree of both": lambda f: jax.tree.map(f, {"a": X, "b": W}, {"a": W, "b": X}),
    "named scopes": lambda f: jax.jit(jax.named_scope("a")(jax.named_call(f, name="b")))(X, W),
    "compiler options": lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(X, W),
    "at compile time": at_compile_time,
    "random numbers": lambda f: jax.jit(lambda key: f(jax.random.normal(key, (3,)), W))(KEY),
    "chained": lambda f: jax.jit(lambda x, w: f(f(f(x, w), w), f(w, x)))(X, W),
    "platform_dependent": lambda f: lax.platform_dependent(X, W, cpu=f, default=lambda x, w: x),
    # vmap
    "vmap": lambda f: jax.vmap(f)(ROWS, ROWS + 1),
    "vmap of x": lambda f: jax.vmap(f, (0, None))(ROWS, W),
    "vmap of w": lambda f: jax.vmap(f, (None, 0))(X, ROWS),
    "vmap of other axes": lambda f: jax.vmap(f, (1, -1), 1)(ROWS.T, ROWS.T),
    "vmap, closed over": lambda f: jax.vmap(lambda x: f(x, W))(ROWS),
    "vmap of trees": lambda f: jax.vmap(lambda t: f(t["x"], t["w"]), ({"x": 0, "w": None},))({"x": ROWS, "w": W}),
    "vmap twice": lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(ROWS, ROWS),
    "vmap with a name": lambda f: jax.vmap(
        lambda x: f(x - lax.pmean(x, "i"), W) + lax.axis_index("i").astype(x.dtype), axis_name="i"
    )(ROWS),
    "vmap with a size": lambda f: jax.vmap(lambda: f(X, W), axis_size=4, in_axes=())(),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f), (0, None))(ROWS, W),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f, (0, None)))(ROWS, W),
    "vmap, spmd": spmd,
    "vmap of no examples": lambda f: jax.vmap(f, (0, None))(ROWS[:0], W),
    "vectorize": lambda f: jnp.vectorize(f, signature="(n),(n)->(n)")(ROWS, ROWS + 1),
    "apply_along_axis": lambda f: jnp.apply_along_axis(lambda x: f(x, W), 1, ROWS),
    # derivatives
    "grad": lambda f: jax.grad(total(f))(X, W),
    "grad of both": lambda f: jax.jit(jax.grad(total(f), (0, 1)))(X, W),
    "value_and_grad": lambda f: jax.value_and_grad(total(f), 1)(X, W),
    "grad with aux": lambda f: jax.grad(lambda x: (f(x, W).sum(), {"aux": f(W, x)}), has_aux=True)(X),
    "grad of trees": lambda f: jax.grad(lambda t: f(t["x"], t["w"][0]).sum())({"x": X, "w": [W]}),
    "stop_gradient": lambda f: jax.grad(lambda x: (lax.stop_gradient(f(x, W)) * f(x, W)).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X, W), (DX, X)),
    "jvp with aux": lambda f: jax.jvp(lambda x: (f(x, W), x), (X,), (DX,), has_aux=True),
    "jvp of x": lambda f: jax.jit(lambda x, dx: jax.jvp(lambda x: f(x, W), (x,), (dx,)))(X, DX),
    "vjp": lambda f: jax.vjp(f, X, W)[1](DX),
    "vjp with aux": lambda f: jax.vjp(lambda x: (f(x, W), x), X, has_aux=True)[1](DX),
    "linearize": lambda f: jax.linearize(f, X, W)[1](DX, X),
    "linearize, vmap, transpose": lambda f: jax.linear_transpose(jax.linearize(f, X, W)[1], X, W)(DX),
    "vmap of a linear function": lambda f: jax.vmap(jax.linearize(f, X, W)[1], (0, None))(ROWS, W),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1))(X, W),
    "jacrev": lambda f: jax.jit(jax.jacrev(f, (0, 1)))(X, W),
    "hessian": lambda f: jax.hessian(total(f), (0, 1))(X, W),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f))(X, W),
    "grad of grad": lambda f: jax.grad(lambda x: (jax.grad(total(f))(x, W) ** 2).sum())(X),
    "jvp of grad": lambda f: jax.jvp(lambda x: jax.grad(total(f))(x, W), (X,), (DX,)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(lambda x: f(x, W), (x,), (DX,))[1].sum())(X),
    "grad of vmap": lambda f: jax.grad(lambda w: (jax.vmap(f, (0, None))(ROWS, w) ** 2).sum())(W),
    "vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(total(f), (0, 1)), (0, None)))(ROWS, W),
    "vmap of jvp": lambda f: jax.vmap(lambda x, dx: jax.jvp(lambda x: f(x, W), (x,), (dx,)))(ROWS, ROWS),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(total(f)), (0, None))(ROWS[:2], W),
    "checkpoint": remat(None),
    "checkpoint, all saved": remat(jax.checkpoint_policies.everything_saveable),
    "checkpoint, nothing saved": remat(jax.checkpoint_policies.nothing_saveable),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "custom_gradient": custom_gradient,
    "custom_vmap": custom_vmap,
    "closure_convert": closure_convert,
    # control flow
    "scan": scan,
    "scan in jit, reversed, unrolled": lambda f: jax.jit(
        lambda: lax.scan(lambda c, x: (f(c, x), c), X, ROWS, reverse=True, unroll=2)
    )(),
    "grad of scan": grad_of_scan,
    "grad of unrolled scan": lambda f: grad_of_scan(f, unroll=3),
    "checkpoint in scan": checkpointed_scan,
    "vmap of scan": lambda f: jax.vmap(lambda x: lax.scan(lambda c, _: (f(c, W), c), x, length=3))(ROWS),
    "map": lambda f: lax.map(lambda x: f(x, W), ROWS),
    "map in batches": lambda f: lax.map(lambda x: f(x, W), ROWS, batch_size=3),
    "associative_scan": lambda f: lax.associative_scan(f, ROWS),
    "while_loop": while_loop,
    "jvp of while_loop": lambda f: jax.jvp(
        lambda w: lax.while_loop(lambda c: c.sum() < 9, lambda c: f(c, w) + 3, X), (W,), (DX,)
    ),
    "fori_loop": lambda f: jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: f(c, W), x).sum())(X),
    "vmap of fori_loop": vmap_of_while,
    "cond": cond,
    "grad of cond": lambda f: jax.grad(lambda x: cond(f, x, x[0] > 0).sum())(X),
    "vmap of cond": lambda f: jax.vmap(lambda x: cond(f, x, x[0] > 0))(ROWS),
    "switch": switch,
    "select": lambda f: jnp.where(X > 0, f(X, W), 0.0),
    # devices
    "shard_map": shard_map,
    "grad of shard_map": lambda f: shard_map(f, lambda g: jax.grad(lambda x: (g(x) ** 2).sum())),
    "psum in shard_map": psum_in_shard_map,
    "split operands": lambda f: jax.jit(jax.vmap(f, (0, None)))(split(ROWS), W),
    "split operands, eager": lambda f: jax.vmap(f, (0, None))(split(ROWS), W),
    "grad of split operands": lambda f: jax.jit(jax.grad(lambda w, x: jax.vmap(f, (0, None))(x, w).sum()))(
        W, split(ROWS)
    ),
    "in_shardings and out_shardings": out_shardings,
    "with_sharding_constraint": constrained,
    "committed": lambda f: f(*jax.device_put((X, W), jax.devices()[1])),
    # operands
    "NumPy": lambda f: (
        f(np.asarray(X), np.asarray(W)),
        jax.jit(f)(np.asarray(X), W),
        jax.vmap(f)(np.ones((2, 3), np.float32), ROWS[:2]),
    ),
    "weak types": lambda f: f(jnp.broadcast_to(jnp.asarray(2.0), (3,)), W),
    "bfloat16": lambda f: dtypes(f, jnp.bfloat16),
    "float16": lambda f: dtypes(f, jnp.float16),
    "float64": x64,
    "no elements": lambda f: (f(X[:0], W[:0]), jax.grad(total(f))(X[:0], W[:0])),
    "more axes": lambda f: f(jnp.ones((2, 4, 3)), jnp.ones((2, 4, 3))),
    "disable_jit": under(jax.disable_jit),
    "checking_leaks": under(jax.checking_leaks),
    "debug_nans": under(lambda: jax.debug_nans(True)),
    # Equinox
    "filter_jit": lambda f: eqx.filter_jit(f)(X, W),
    "filter_vmap": lambda f: eqx.filter_vmap(f, in_axes=(0, None))(ROWS, W),
    "filter_grad": lambda f: eqx.filter_grad(lambda model: (model(X) ** 2).sum())(Model(f, W)).weight,
    "filter_jvp": lambda f: eqx.filter_jvp(f, (X, W), (DX, None)),
    "filter_vjp": lambda f: eqx.filter_vjp(f, X, W)[1](DX),
    "filter_jacfwd and filter_jacrev": lambda f: (eqx.filter_jacfwd(f)(X, W), eqx.filter_jacrev(f)(X, W)),
    "filter_hessian": lambda f: eqx.filter_hessian(total(f))(X, W),
    "filter_checkpoint": lambda f: eqx.filter_grad(eqx.filter_checkpoint(total(f)))(X, W),
    "filter_closure_convert": lambda f: eqx.filter_closure_convert(f, X, W)(X, W),
    "filter_custom_jvp": filter_custom_jvp,
    "filter_eval_shape": lambda f: jnp.ones(eqx.filter_eval_shape(f, X, W).shape),
    "ensembles": lambda f: eqx.filter_vmap(lambda w: Model(f, w)(X))(ROWS),
    "steps of training": trained,
    "Sequential": of_a_sequence,
}

# Of numbers, which not every function takes.
NUMBERS = {
    "two numbers": lambda f: jax.jit(f)(2.0, 3.0),
    "a number and an array": lambda f: (f(2.0, W), f(X, 2.0)),
    "NumPy's numbers": lambda f: f(np.float32(2), np.float32(3)),
    "grad by a number": lambda f: jax.grad(f)(2.0, 3.0),
    "grad of grad by a number": lambda f: jax.grad(jax.grad(f))(2.0, 3.0),
    "jvp by numbers": lambda f: jax.jvp(f, (2.0, 3.0), (1.0, 0.5)),
    "jvp of arrays by numbers": lambda f: jax.jvp(f, (jnp.float32(2), jnp.float32(3)), (1.0, 0.5)),
    "linearize at a number": lambda f: jax.linearize(f, 2.0, 3.0)[1](1.0, 0.5),
    "vjp of a number": lambda f: jax.vjp(f, 2.0, 3.0)[1](1.0),
    "vmap beside a number": lambda f: (jax.vmap(lambda x: f(x, 2.0))(X), jax.vmap(lambda x: f(2.0, x))(X)),
    "vmap in_axes None of a number": lambda f: jax.vmap(f, (0, None))(X, 2.0),
    "scan with a number": lambda f: lax.scan(lambda c, x: (f(c, 2.0), f(2.0, x)), 1.0, X),
    "fori_loop of a number": lambda f: lax.fori_loop(0, 3, lambda i, c: f(c, 2.0), 1.5),
}
