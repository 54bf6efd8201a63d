"""The bytes and operations that a profile counts, and the limits that it compares with."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext, xla
from eqxcallback.inspection._costs import bytes_of, flops_of, flops_of_reference
from eqxcallback.inspection._hlo import Module
from eqxcallback.inspection._limits import limits

from .layers import Scale


def compiled(fn, *shapes):
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def test_operations_as_xla_counts_them():
    def program(x, w, image, filters):
        convolved = jax.lax.conv_general_dilated(image, filters, (1, 1), "VALID")
        return jax.nn.relu(x @ w).sum(0), jnp.where(x > 0, x, 2 * x), convolved.max()

    program = compiled(program, (4, 6), (6, 10), (1, 3, 16, 16), (8, 3, 3, 3))
    module, analysis = Module(program.as_text() or ""), program.cost_analysis()
    counts = [flops_of(instruction, module) for instruction in module.computations[module.entry].values()]
    assert analysis is not None
    assert None not in counts
    assert sum(count or 0 for count in counts) == analysis["flops"]


def test_what_nobody_can_count():
    module = Module(compiled(jnp.sort, (8,)).as_text() or "")
    assert None in [flops_of(instruction, module) for instruction in module.computations[module.entry].values()]


@pytest.mark.parametrize(
    ("types", "size"),
    [
        ("f32[2,3]{1,0}", 24),
        ("bf16[5]", 10),
        ("pred[7]", 7),
        ("s4[3]", 2),
        ("c64[2]", 16),
        ("token[]", 0),
        ("f8e4m3fn[3]", 3),
    ],
)
def test_bytes_of_types(types, size):
    text = f"HloModule m\n\nENTRY %e (x: {types}) -> {types} {{\n  %x = {types} parameter(0)\n"
    text += f'  ROOT %y = ({types}, {types}) custom-call(%x, %x), custom_call_target="z"\n}}\n'
    module = Module(text)
    assert bytes_of(module.root("e"), module) == 3 * size  # one operand, though it is passed twice, and two results


def in_all(fn, *shapes):
    """The bytes of all instructions of a program that has no loops."""
    module = Module(compiled(fn, *shapes).as_text() or "")
    return {
        instruction.name: bytes_of(instruction, module)
        for instruction in module.computations[module.entry].values()
        if instruction.opcode not in ("parameter", "constant", "tuple", "bitcast", "copy")
    }


def test_of_what_is_sliced_the_slice_counts():
    (size,) = in_all(lambda x: 2 * x[100:108], (1000,)).values()
    assert size == 4 * (8 + 8)
    (size,) = in_all(lambda x: x[100:108] + x[200:208], (1000,)).values()
    assert size == 4 * (2 * 8 + 8)


def test_of_what_is_updated_the_slice_counts():
    text = "HloModule m\n\n%f (a: f32[1000], b: f32[8], i: s32[]) -> f32[1000] {\n"
    text += "  %a = f32[1000] parameter(0)\n  %b = f32[8] parameter(1)\n  %i = s32[] parameter(2)\n"
    text += "  ROOT %u = f32[1000] dynamic-update-slice(%a, %b, %i)\n}\n\n"
    text += "ENTRY %e (x: f32[1000], y: f32[8], j: s32[]) -> f32[1000] {\n"
    text += "  %x = f32[1000] parameter(0)\n  %y = f32[8] parameter(1)\n  %j = s32[] parameter(2)\n"
    text += "  ROOT %z = f32[1000] fusion(%x, %y, %j), kind=kLoop, calls=%f\n}\n"
    module = Module(text)
    assert bytes_of(module.root("e"), module) == bytes_of(module.root("f"), module) == 4 * (8 + 1 + 8)


def reference_flops(fn, *args):
    (site,) = xla.call_sites(jax.jit(fn).trace(*args).jaxpr, "cpu")
    return flops_of_reference(site)


def test_the_reference_says_how_much_a_kernel_computes():
    x = jnp.ones((4, 3))
    assert reference_flops(jax.vmap(Scale(jnp.ones(3))), x) == 12
    half, weight = x.astype(jnp.bfloat16), jnp.ones((5, 3), jnp.bfloat16)
    assert (reference_flops(eqxc.ops.linear, half, weight) or 0) >= 2 * 4 * 3 * 5
    without = eqxc.Op("without", kernels={"cpu": eqxc.PythonKernel(lambda ctx, out, x: None, out_type=lambda x: x)})
    assert reference_flops(without, x) is None


def looping(reference):
    return eqxc.Op("loop", kernels={"cpu": eqxc.PythonKernel(lambda ctx, out, x: None)}, reference=reference)


def test_loops_count_by_their_turns():
    """XLA would count one."""
    x = jnp.ones((4, 3))

    def turn(x, _):
        return jax.lax.scan(lambda x, _: (x * x, None), x, length=5)[0] * x, None

    assert reference_flops(looping(lambda x: jax.lax.scan(turn, x, length=7)[0]), x) == pytest.approx(
        7 * 6 * 12, rel=0.3
    )
    assert reference_flops(looping(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * x, x)), x) is None


def test_attention_counts_both_products():
    q = jnp.ones((2048, 1, 8))  # longer than what its reference does at once
    count = reference_flops(lambda q: eqxc.ops.attention(q, q, q), q)
    assert count is not None
    assert 4 * 2048 * 2048 * 8 < count < 6 * 2048 * 2048 * 8


@pytest.mark.parametrize("isa", _ext.available_isas())
def test_the_probe_counts_what_it_does(isa):
    before = _ext.isa()
    _ext.set_isa(isa)
    try:
        assert _ext.multiply_adds(5) == 5 * _ext.multiply_adds(1) > 0
    finally:
        _ext.set_isa(before)


def test_limits_are_measured_once():
    assert limits() is limits()
    assert limits().threads >= 1
    assert min(limits().bytes_per_second, limits().flops_per_second) > 1e8
