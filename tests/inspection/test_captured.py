"""Reports on plans that no XLA has written. On those of XLA: tests/deviceless/test_capture.py."""

import jax
import jax.numpy as jnp

import eqxcallback as eqxc
from eqxcallback import xla
from eqxcallback.inspection import _captured, _inspect

from .layers import AddOne


HLO = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  ROOT %call.1 = f32[3]{0} custom-call(%x), custom_call_target="t", metadata={op_name="jit(f)/Layer"}
}
"""
CONFIG = "xla_gpu_graph_min_graph_size: 5\nxla_gpu_enable_command_buffer: CUSTOM_CALL\n"
NAMES = 'thunk_metadata {\n thunk_info {\n profile_annotation: "call.1"\n thunk_id: 1\n }\n}\n'

CALL = eqxc.inspection.ExternalCall(
    path="jit(f)/Layer",
    op="Layer",
    kind="forward",
    lane="native",
    target="t",
    operands=("float32[3]",),
    results=("float32[3]",),
    in_place=(),
    captured=None,
    captured_reason="",
    fallback="",
    times=1,
)


def judged(thunks, again="", *, hlo=HLO, names=NAMES, config=CONFIG):
    asked = []

    def compile_again(options):
        asked.append(options)
        return xla.Compiled(hlo, again, names, config)

    (call,) = _captured.resolved([CALL], xla.Compiled(hlo, thunks, names, config), compile_again)
    assert asked in ([], [{"xla_gpu_graph_min_graph_size": 1}])
    return call.captured, call.captured_reason, len(asked)


def test_recorded():
    plan = "000: kCommandBuffer\n    001: kCustomCall\n"
    assert judged(plan) == (True, "recorded into a command buffer of 1 thunk", 0)


def test_between_two():
    again = "002: kFft\n000: kCommandBuffer\n    001: kCustomCall\n003: kWhile\n"
    captured, reason, compiled = judged("001: kCustomCall\n", again)
    assert (captured, compiled) == (False, 1)
    assert reason.startswith("its run has 1 thunk, ended by what is not recorded: kFft and the loop ; XLA ")


def test_a_plan_that_is_not_understood():
    """Another version's: nothing is claimed."""
    for plan, names in (("", ""), ("1) custom call\n", NAMES), ("001: kCustomCall\n", "")):
        captured, reason, _ = judged(plan, names=names)
        assert captured is None
        assert reason == "declared compatible, and XLA decides: its plan does not show this call"
    assert judged("001: kCustomCall\n", "")[:2] == (False, "XLA does not record it, and does not say why")


def test_options_that_are_not_known():
    again = "000: kCommandBuffer\n    001: kCustomCall\n"
    captured, reason, _ = judged("001: kCustomCall\n", again, config="")
    assert captured is False
    assert reason.startswith("its run has 1 thunk; XLA records those of at least ")


def test_removed():
    text = "HloModule jit_f\n\nENTRY %main (x: f32[3]) -> f32[3] {\n  ROOT %x = f32[3]{0} parameter(0)\n}\n"
    assert judged("001: kCopy\n", hlo=text)[:2] == (False, "XLA has removed this call")


class Recorder:
    """In place of the reader of plans."""

    def resolved(self, calls, compiled, compile_again):
        assert (compiled.thunks, compiled.device) == ("", "")
        assert compile_again({_captured.SMALLEST: 1}).hlo_text.startswith("HloModule jit_")
        return calls


def test_the_way_of_a_gpu_that_is_there(monkeypatch):
    """On the CPU, which writes no plan."""
    monkeypatch.setattr(_inspect, "_GPUS", ("cpu",))
    monkeypatch.setattr(_inspect, "_captured", Recorder())
    report = eqxc.inspect(jax.jit(AddOne(), donate_argnums=0, compiler_options={_captured.SMALLEST: 3}), jnp.ones(3))
    assert (report.stage, report.device, report.not_compiled) == ("compiled", "", "")
    assert report.calls[0].in_place[0].state == "in place"
