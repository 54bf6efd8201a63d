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
