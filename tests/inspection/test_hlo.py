"""Compiled text that a CPU does not write, in XLA's spelling."""

import pytest

from eqxcallback.inspection import Alias, ExternalCall
from eqxcallback.inspection._copies import resolved


CALL = ExternalCall(
    path="jit(f)/Fill",
    op="Fill",
    kind="forward",
    lane="native",
    target="fill",
    operands=("float32[3]",),
    results=("float32[3]",),
    in_place=(Alias(0, 0, None),),
    captured=None,
    captured_reason="",
    fallback="",
    times=1,
)
KERNEL = """custom-call(%operand), custom_call_target="fill", output_to_operand_aliasing={{}: (0, {})}, \
metadata={op_name="jit(f)/native_call"}"""


def state(text):
    (call,) = resolved([CALL], text)
    return call.in_place[0].state, call.in_place[0].reason


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [("", "not donated"), (", input_output_alias={ {}: (0, {}, may-alias) }", "XLA's choice")],
)
def test_asynchronous_copies(attributes, reason):
    text = f"""HloModule jit_f{attributes}

ENTRY %main (x: f32[3]) -> f32[3] {{
  %x = f32[3]{{0}} parameter(0)
  %copy-start = (f32[3]{{0}}, f32[3]{{0}}, u32[]) copy-start(%x)
  %operand = f32[3]{{0}} copy-done(%copy-start)
  ROOT %native_call = f32[3]{{0}} {KERNEL}
}}
"""
    assert state(text) == ("copied", reason)


def test_copies_in_other_computations():
    """Large copies are split between threads, and small ones become fusions of several results."""
    text = f"""HloModule jit_f

%parallel_copy (p: f32[3]) -> (f32[3], f32[3]) {{
  %p = f32[3]{{0}} parameter(0)
  %copy.1 = f32[3]{{0}} copy(%p)
  %negate.1 = f32[3]{{0}} negate(%p)
  ROOT %tuple.1 = (f32[3]{{0}}, /*index=1*/f32[3]{{0}}) tuple(%copy.1, %negate.1)
}}

ENTRY %main (x: f32[3]) -> f32[3] {{
  %x = f32[3]{{0}} parameter(0)
  %fusion = (f32[3]{{0}}, f32[3]{{0}}) fusion(%x), kind=kLoop, calls=%parallel_copy
  %operand = f32[3]{{0}} get-tuple-element(%fusion), index=INDEX
  ROOT %native_call = f32[3]{{0}} {KERNEL}
}}
"""
    assert state(text.replace("INDEX", "0")) == ("copied", "not donated")
    assert state(text.replace("INDEX", "1")) == ("in place", "")


def test_branches_of_a_boolean():
    text = f"""HloModule jit_f

%then (p: f32[3]) -> f32[3] {{
  %p = f32[3]{{0}} parameter(0)
  %operand = f32[3]{{0}} bitcast(%p)
  ROOT %native_call = f32[3]{{0}} {KERNEL}
}}

%otherwise (q: f32[3]) -> f32[3] {{
  ROOT %q = f32[3]{{0}} parameter(0)
}}

ENTRY %main (b: pred[], x: f32[3]) -> f32[3] {{
  %b = pred[] parameter(0)
  %x = f32[3]{{0}} parameter(1)
  %copy.2 = f32[3]{{0}} copy(%x)
  %conditional = f32[3]{{0}} conditional(%b, %copy.2, %x), true_computation=%then, false_computation=%otherwise
  ROOT %copy.3 = f32[3]{{0}} copy(%conditional)
}}
"""
    assert state(text) == ("copied", "not donated")


def test_a_call_that_is_gone():
    text = "HloModule jit_f\n\nENTRY %main (x: f32[3]) -> f32[3] {\n  ROOT %x = f32[3]{0} parameter(0)\n}\n"
    (call,) = resolved([CALL], text)
    assert call.note == "XLA has removed this call"
    assert call.in_place[0].state is None
