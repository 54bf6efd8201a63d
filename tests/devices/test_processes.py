"""One program in two processes, each with its own devices: kernels run where the data are, gradients are summed over all."""

import os
import socket
import subprocess
import sys


PROGRAM = """
import os, sys
rank, port = int(sys.argv[1]), sys.argv[2]
import jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.ops.norm import _reference as reference

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank, initialization_timeout=30)
assert (jax.device_count(), jax.local_device_count()) == (4, 2)

calls = []


class Scale(eqxc.Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        calls.append(("forward", x.shape))
        out.write(np.tanh(np.asarray(x) * np.asarray(self.weight)))

    def reference(self, x):
        return jnp.tanh(x * self.weight)

    def backward(self, ctx, grads, args, out, cotangents):
        calls.append(("backward", args[0].shape))
        inner = np.asarray(cotangents) * (1 - np.asarray(out) ** 2)
        for grad, value in ((grads[0].weight, inner * np.asarray(args[0])), (grads[1], inner * np.asarray(self.weight))):
            if grad is not None:
                array = np.asarray(grad)
                array[...] = value.sum(0) if value.ndim > array.ndim else value


class Effect(Scale):
    has_side_effect = True


def check(tree, want):
    for value, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
        for shard in value.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(expected)[shard.index], rtol=1e-4, atol=1e-5)


mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
whole = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("a")), whole[4 * rank : 4 * rank + 4])
w = np.arange(1, 4, dtype=np.float32)
weight = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P()), w)
layer = Scale(weight)
rows = lambda layer, x: jax.vmap(layer)(x)
loss = lambda layer, x: (rows(layer, x) ** 2).sum()
plain = lambda w, x: jnp.tanh(x * w[None])
want = jax.grad(lambda w, x: (plain(w, x) ** 2).sum(), (0, 1))(w, whole)

check(jax.jit(rows)(layer, x), plain(w, whole))
assert calls == [("forward", (2, 3))] * 2, calls  # one for each device of this process
calls.clear()
gradient = jax.jit(jax.grad(loss, (0, 1)))
text = gradient.lower(layer, x).compile().as_text()
assert (text.count(" all-gather("), text.count(" all-reduce(")) == (0, 1)
check(gradient(layer, x), want)
assert sorted(calls) == [("backward", (2, 3))] * 2 + [("forward", (2, 3))] * 2, calls
calls.clear()
check(jax.jit(lambda layer, x: (rows(layer, x), x + 1)[1])(Effect(weight), x), whole + 1)
assert calls == [("forward", (2, 3))] * 2, calls
calls.clear()
check(rows(layer, x), plain(w, whole))  # eager
assert calls == [("forward", (2, 3))] * 2, calls

inside = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=(jax.P(), jax.P("a")), out_specs=(jax.P(), jax.P("a")))
check(jax.jit(inside)(layer, x), want)

norm = lambda w, x: ops.rms_norm(x, w)
plain_norm = lambda w, x: reference.rms_norm(x, w, eps=1e-5)
of_rows = lambda f: jax.grad(lambda w, x: (jax.vmap(f, (None, 0))(w, x) ** 2).sum(), (0, 1))
check(jax.jit(jax.vmap(norm, (None, 0)))(weight, x), jax.vmap(plain_norm, (None, 0))(w, whole))
check(jax.jit(of_rows(norm))(weight, x), of_rows(plain_norm)(w, whole))
jax.distributed.shutdown()
print("finished", flush=True)
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_two_processes(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    port, processes, logs = free_port(), [], [tmp_path / "0.log", tmp_path / "1.log"]
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                command = [sys.executable, "-c", PROGRAM, str(rank), str(port)]
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        waited = [process.wait(timeout=90) for process in processes[::-1]]
    except subprocess.TimeoutExpired:
        waited = ["timed out"]
    finally:
        for process in processes:  # SIGTERM is not enough: JAX handles it, and waits for the other one
            process.kill()
            process.wait()
    texts = "\n".join(log.read_text() for log in logs)
    assert waited == [0, 0], texts
    assert texts.count("finished") == 2, texts
