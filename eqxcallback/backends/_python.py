"""The python lane: bodies that XLA calls on its own buffers."""

from .. import xla
from ..kernel import PythonKernel
from ._implementation import Implementation


def prepare(implementation: Implementation, kernel: PythonKernel) -> xla.PythonPlan:
    body = xla.FlatBody(implementation.body or kernel.body)
    return xla.PythonPlan(
        body,
        implementation.aliases,
        implementation.has_side_effect,
        kernel.command_buffer_compatible,
        implementation.input_layouts,
        implementation.output_layouts,
    )
