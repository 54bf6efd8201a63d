"""Derivatives of a function of a parameter and an argument."""

from typing import Any

import jax
import jax.numpy as jnp


def both(loss):
    return lambda f: loss(lambda w, x: (f(w, x) ** 2).sum())


def scanned(f):
    return lambda w, x: (jax.lax.scan(lambda c, _: (f(w, c), c), x, length=3)[0] ** 2).sum()


def looped(f):
    return lambda w, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(w, c[1])), (0, x))[1]


def chosen(f):
    return lambda w, x: jax.lax.cond(x.sum() > 0, lambda w, x: f(w, x).sum(), lambda w, x: x.sum(), w, x)


POLICIES = jax.checkpoint_policies

DERIVATIVES: dict[str, Any] = {
    "grad of both": both(lambda f: jax.grad(f, (0, 1))),
    "grad of the parameter": both(lambda f: jax.grad(f, 0)),
    "grad of the argument": both(lambda f: jax.grad(f, 1)),
    "value and grad": both(lambda f: jax.value_and_grad(f, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (x, w)),
    "jvp of the parameter": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (x,)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "hessian": both(lambda f: jax.hessian(f, (0, 1))),
    "reverse over reverse": both(lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1))),
    "reverse over forward": both(lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), (0, 1))),
    "forward over forward": both(lambda f: jax.jacfwd(jax.jacfwd(f, (0, 1)), (0, 1))),
    "mixed": both(lambda f: jax.jacfwd(jax.grad(f, 0), 1)),
    "third order": both(lambda f: jax.jacfwd(jax.hessian(f, (0, 1)), (0, 1))),
    "third order in reverse": both(lambda f: jax.jacrev(jax.jacrev(jax.grad(f), 1), (0, 1))),
    "jvp of grad": both(lambda f: lambda w, x: jax.jvp(jax.grad(f, (0, 1)), (w, x), (x, w))),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](x, w),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](w),
    "transposed": lambda f: lambda w, x: jax.linear_transpose(jax.linearize(f, w, x)[1], w, x)(w),
    "checkpoint": both(lambda f: jax.grad(jax.checkpoint(f), (0, 1))),
    "checkpoint of everything": both(lambda f: jax.grad(jax.checkpoint(f, policy=POLICIES.everything_saveable), 1)),
    "checkpoint of dots": both(lambda f: jax.grad(jax.checkpoint(f, policy=POLICIES.dots_saveable), (0, 1))),
    "hessian of checkpoint": both(lambda f: jax.hessian(jax.checkpoint(f), (0, 1))),
    "scan": lambda f: jax.grad(scanned(f), (0, 1)),
    "hessian of scan": lambda f: jax.hessian(scanned(f), (0, 1)),
    "checkpoint in scan": lambda f: jax.grad(scanned(jax.checkpoint(f)), (0, 1)),
    "while": lambda f: lambda w, x: jax.jvp(looped(f), (w, x), (x, w)),
    "cond": lambda f: jax.grad(chosen(f), (0, 1)),
    "vmap of grad": both(lambda f: lambda w, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(w, jnp.stack([x, w, x]))),
    "vmap of hessian": both(lambda f: lambda w, x: jax.vmap(jax.hessian(f, (0, 1)), (0, None))(jnp.stack([x, w]), x)),
    "grad of vmap": lambda f: jax.grad(
        lambda w, x: (jax.vmap(f, (None, 0))(w, jnp.stack([x, w, x])) ** 2).sum(), (0, 1)
    ),
    "hessian of vmap": lambda f: jax.hessian(
        lambda w, x: (jax.vmap(f, (None, 0))(w, jnp.stack([x, w])) ** 2).sum(), (0, 1)
    ),
    "unused": lambda f: jax.grad(lambda w, x: (f(w, x) * 0, w.sum())[1], (0, 1)),
    "twice": lambda f: jax.grad(lambda w, x: (f(w, f(f(w, w), x)) ** 2).sum(), (0, 1)),
}
