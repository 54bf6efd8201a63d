"""A layer and functions with effects, which show that they ran: another process imports this."""

import sys

import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc


class Logged(eqxc.Layer):
    has_side_effect = True

    def kernel(self, ctx, out, x):
        out.write(np.asarray(x))
        sys.stdout.write(f"kernel {np.asarray(x).tolist()}\n")

    def reference(self, x):
        return jnp.asarray(x)


def tapped(x, transforms):
    sys.stdout.write(f"tap {np.asarray(x).tolist()}\n")


def unordered(x):
    """Nobody uses what the layer returns."""
    Logged()(x)
    return x + 1


def ordered(x):
    eqxc.debug.print(x, what="first", ordered=True)
    y = eqxc.debug.tap(tapped, x + 1, ordered=True)
    return eqxc.debug.print(y + 1, what="last", ordered=True)


def both(x):
    return ordered(unordered(x))
