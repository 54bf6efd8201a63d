"""Training on several devices: the numbers of one device, one sum for each step, and processes that are stopped and killed."""

import functools
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from models._errors import ModelFileError
from models.train.__main__ import begin, main
from models.train.options import parse
from models.train.run import Training
from models.train.run_folder import RunFolder
from models.train.trainer import Trainer, make_optimizer
from models.transformer import GPT, Config, ViT, gpt_loss, vit_loss

from ..devices.test_processes import free_port
from .test_parallel import collectives, mesh_of
from .test_processes import gone, started
from .test_train import TEXT, TINY, losses, promotion as promotion, snapshot_steps


RANDOM = np.random.default_rng(0)
GPT_MODEL = GPT(Config(1, 32, 128, 2, 16), 64, key=jax.random.key(0))
VIT_MODEL = ViT(Config(1, 32, 128, 2, 17), 4, 10, key=jax.random.key(0))
GPT_BATCH = RANDOM.integers(0, 64, (8, 17)).astype(np.int32)
VIT_BATCH = RANDOM.normal(size=(8, 16, 4)).astype(np.float32), RANDOM.integers(0, 10, 8).astype(np.int32)
of_each = jax.vmap(ops.linear_cross_entropy, in_axes=(0, None, 0))
MODELS = {
    "gpt": (eqxc.fuse(GPT_MODEL).model, functools.partial(gpt_loss, of_each), GPT_BATCH),
    "vit": (eqxc.fuse(VIT_MODEL).model, functools.partial(vit_loss, ops.softmax_cross_entropy), VIT_BATCH),
}


def trained(trainer, model, batch):
    """The state after 20 steps, and their losses."""
    trainer.compile(batch)
    state, curve = trainer.place(trainer.begin(model)), []
    for _ in range(20):
        state, value = trainer.step(state, batch)
        curve.append(value)
    return state, curve


@pytest.mark.parametrize(
    ("name", "count", "dtype", "bound"),
    [("gpt", 8, "float32", 2e-5), ("gpt", 2, "bfloat16", 1e-2), ("vit", 4, "float32", 2e-5)],
)
def test_the_numbers_of_one_device_and_one_sum(name, count, dtype, bound):
    model, loss, batch = MODELS[name]
    curves = []
    for mesh in (None, mesh_of(count)):
        trainer = Trainer(model, loss, make_optimizer(rate=1e-2, steps=20), dtype=jnp.dtype(dtype), mesh=mesh)
        state, curve = trained(trainer, model, batch)
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] * 0.8
    np.testing.assert_allclose(curves[1], curves[0], rtol=bound)
    assert collectives(trainer._compiled) == {"all-reduce": 1}
    for leaf in jax.tree.leaves(state):
        assert len(leaf.addressable_shards) == count
        assert all(np.array_equal(shard.data, leaf.addressable_data(0)) for shard in leaf.addressable_shards)


def test_parts_of_a_batch_have_rows_of_each_device():
    model, loss, batch = MODELS["gpt"]
    curves = []
    for mesh, parts in ((None, 1), (mesh_of(2), 4)):
        options = {"dtype": jnp.dtype("float32"), "mesh": mesh, "accumulate": parts}
        trainer = Trainer(model, loss, make_optimizer(rate=1e-2, steps=20), **options)
        curves.append(trained(trainer, model, batch)[1])
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-5)
    assert not collectives(trainer._compiled).keys() - {"all-reduce"}  # no rows move


def train(*options):
    """The command of a process."""
    return ["-m", "models.train", *options]


def commands(*options):
    """The commands of two processes that train one model."""
    several = ["--processes", 2, "--coordinator", f"localhost:{free_port()}"]
    return [train(*options, *several, "--process", process) for process in range(2)]


def wait_for(condition, processes):
    deadline = time.monotonic() + 100
    while not condition():
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.usefixtures("interruptible")
def test_two_processes_that_are_stopped_and_killed_end_to_the_bit(tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    folder, whole = tmp_path / "run", tmp_path / "whole"
    options = ["gpt", "--text", tmp_path / "text", "--steps", "40", "--save-every", "8", *TINY]

    with started(*commands(*options, "--out", folder)) as processes:
        wait_for(lambda: (folder / "losses.jsonl").exists() and len(losses(folder)) > 2, processes)
        processes[1].send_signal(signal.SIGINT)  # which process 0 is told
        results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [130, 130], results
    stopped = len(losses(folder))
    assert 2 < stopped < 40
    assert snapshot_steps(folder)[-1] == stopped
    assert f"stopped after step {stopped};".encode() in results[0][1]
    assert re.fullmatch(rb"process 1 of 2 waits for the others at .*\n", results[1][1])
    assert results[1][0] == b""

    with started(*commands("resume", folder)) as processes:
        wait_for(lambda: len(losses(folder)) > stopped, processes)
        processes[0].kill()
        output, errors = processes[1].communicate(timeout=60)
    assert (processes[1].returncode, output) == (2, b""), errors
    assert re.fullmatch(rb"process 1 of 2 waits for the others at .*\n" + gone(1, "train"), errors), errors

    # Two devices of this process go on: the sum of two numbers has one order.
    assert main(["resume", str(folder)]) == 0
    assert main([*map(str, options), "--out", str(whole), "--devices", "2"]) == 0
    assert len(losses(folder)) == 40
    assert losses(folder) == losses(whole)
    assert "23,392 weights in f32 on each of 2 devices, step 0 of 40" in capsys.readouterr().err


# Mistakes.


@pytest.fixture
def run_of_four(tmp_path):
    """A run of four devices that has begun."""
    options = parse(f"vit --out {tmp_path} --layers 1 --width 8 --heads 1 --batch 4 --devices 4".split())
    begin(options, RunFolder(tmp_path), None)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt --batch 6 --devices 4", "expected --batch to be a multiple of the 4 devices; got 6"),
        (
            "vit --batch 6 --devices 2 --processes 2 --coordinator localhost:1",
            "expected --batch to be a multiple of the 4 devices; got 6",
        ),
        ("vit --devices 0", "expected --devices of 1 or more; got 0"),
        ("gpt --processes 2", "expected --coordinator and --processes together; got one of them"),
        ("vit --devices 16", "expected --devices of at most 8, which is what JAX has; got 16"),
    ],
)
def test_options_are_checked(arguments, message, tmp_path, capsys):
    assert main([*arguments.split(), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"train: error: {message}\n"


def test_a_run_keeps_its_devices(run_of_four, capsys):
    assert RunFolder(run_of_four).options().devices == 4
    assert main(["resume", str(run_of_four), "--processes", "3", "--coordinator", "localhost:1"]) == 2
    assert capsys.readouterr().err == "train: error: expected --processes to divide the 4 devices of the run; got 3\n"


def test_all_processes_see_the_same_snapshot(run_of_four, monkeypatch):
    monkeypatch.setattr(
        "models.parallel.processes.total", lambda mesh, number: 2
    )  # as if another one saw that of step 2
    training = Training(RunFolder(run_of_four), mesh_of(4))
    with pytest.raises(
        ModelFileError, match=r"the same last snapshot in .* this one sees that of step 0\. Use a folder that"
    ):
        training.restore()
