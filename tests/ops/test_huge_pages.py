"""Large results, which are mapped in huge pages where the system has them."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc


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


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_large_results_are_in_huge_pages(wrap):
    x = jnp.ones(LARGE)
    assert not asks_for_huge_pages(x)  # JAX's own memory: or this test could not fail
    assert asks_for_huge_pages(wrap(eqxc.ops.rms_norm)(x))


def test_gradients_are_in_huge_pages():
    x = jnp.ones(LARGE)
    assert asks_for_huge_pages(jax.jit(jax.grad(lambda x: eqxc.ops.softmax(x).sum()))(x))


def test_memory_of_an_operand_stays_as_it_is():
    cache, rows = jnp.zeros(LARGE), jnp.ones((1, LARGE[1]))
    append = jax.jit(eqxc.ops.cache_append, donate_argnums=0)
    out = append(cache, rows, 7)
    assert cache.is_deleted()
    assert not asks_for_huge_pages(out)
