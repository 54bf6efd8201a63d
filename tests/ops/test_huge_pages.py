"""Large results and weights, which are in huge pages where the system has them."""

import pathlib
import platform
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext


SMAPS = pathlib.Path("/proc/self/smaps")
LARGE = (4096, 4096)  # 64 MiB of f32: malloc maps it anew each time

pytestmark = pytest.mark.skipif(
    not SMAPS.exists() or "VmFlags" not in SMAPS.read_text(), reason="needs Linux's list of mappings and their flags"
)


def asks_for_huge_pages(array):
    """Tell if the memory in the middle of an array is marked: `hg` in the flags of its mapping."""
    address = array.unsafe_buffer_pointer() + array.nbytes // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError(f"no mapping has the address {address:#x}")


@pytest.fixture
def plain():
    """An array of JAX's that does not ask. Memory that was freed by something that asked may be what JAX gets: that is held here
    until the end of the test.
    """
    held = [jnp.ones(LARGE)]
    while asks_for_huge_pages(held[-1]) and len(held) < 50:
        held.append(jnp.ones(LARGE))
    yield held.pop()
    held.clear()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_large_results_are_in_huge_pages(wrap, plain):
    assert not asks_for_huge_pages(plain)  # or this test could not fail
    assert asks_for_huge_pages(wrap(eqxc.ops.rms_norm)(plain))


def test_gradients_are_in_huge_pages():
    x = jnp.ones(LARGE)
    assert asks_for_huge_pages(jax.jit(jax.grad(lambda x: eqxc.ops.softmax(x).sum()))(x))


def test_memory_of_an_operand_stays_as_it_is(plain):
    append = jax.jit(eqxc.ops.cache_append, donate_argnums=0)
    out = append(plain, jnp.ones((1, LARGE[1])), 7)
    assert plain.is_deleted()
    assert not asks_for_huge_pages(out)


def kib_in_huge_pages():
    (count,) = re.findall(r"AnonHugePages:\s+(\d+) kB", pathlib.Path("/proc/self/smaps_rollup").read_text())
    return int(count)


@pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists()
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="needs Linux 6.1 with huge pages, which moves pages that are in use",
)
def test_weights_are_moved_into_huge_pages():
    model = eqx.nn.MLP(512, 512, 1024, 2, key=jax.random.key(0))
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    values, addresses = [np.array(x) for x in arrays], [x.unsafe_buffer_pointer() for x in arrays]
    moved = eqxc.use_huge_pages(model)
    # Not all: a page at the edge of a mapping cannot be one, and there may be no memory for more.
    assert 0 < moved <= sum(x.nbytes for x in arrays)
    assert 1024 * kib_in_huge_pages() >= moved
    assert addresses == [x.unsafe_buffer_pointer() for x in arrays]
    for x, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(x, value)
    assert eqxc.use_huge_pages(model) == moved


def test_weights_that_are_tied_count_once(monkeypatch):
    monkeypatch.setattr(_ext, "move_into_huge_pages", lambda pointer, size: size)
    x, y = jnp.ones((64, 64)), jnp.ones(3)
    assert eqxc.use_huge_pages([x, x, y]) == eqxc.use_huge_pages([x, y]) == x.nbytes + y.nbytes


def test_other_leaves_are_left_alone():
    assert eqxc.use_huge_pages({"f": jax.nn.relu, "n": 3, "x": np.ones(8), "none": None}) == 0
    assert eqxc.use_huge_pages(jax.random.key(0)) in (0, 8)
    sizes = []
    jax.jit(lambda x: sizes.append(eqxc.use_huge_pages(x)))(jnp.ones(8))
    assert sizes == [0]
    x = jnp.ones(8)
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        eqxc.use_huge_pages(x)


def test_arrays_on_several_devices():
    devices = jax.devices("cpu")[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    x = jax.device_put(np.ones((4096, 1024), np.float32), jax.NamedSharding(mesh, jax.P("d")))
    assert 0 <= eqxc.use_huge_pages(x) <= x.nbytes
    np.testing.assert_array_equal(x, 1)
