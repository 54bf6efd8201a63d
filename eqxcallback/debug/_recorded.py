"""Python kernels on a GPU, recorded as XLA records them for a command buffer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from .. import _ext
from . import _checked


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One call of a Python kernel, in the middle of a program."""

    body: Callable[..., None]
    direct: bool
    ctx: _ext.ExecutionContext
    outputs: tuple[_ext.Buffer, ...]
    inputs: tuple[_ext.Buffer, ...]

    def run(self) -> None:
        if self.direct:
            return self.body(self.ctx, *self.outputs, *self.inputs)
        return self.body(self.ctx, self.outputs, self.inputs)

    def record(self) -> _ext.Recording:
        """The kernel called once on a stream that is captured. Nothing is computed."""
        return _ext.Recording(self.body, self.direct, self.ctx, self.outputs, self.inputs)

    def replay(self, recording: _ext.Recording) -> None:
        """Replay a recording in place of the call. Outputs hold noise before, so that nothing else can have written them."""
        places = {buffer._address for buffer in self.inputs}
        recording.replay(tuple(buffer for buffer in self.outputs if buffer._address not in places))


@contextlib.contextmanager
def intercepted(on_call: Callable[[KernelCall], None]) -> Iterator[None]:
    """Within this context `on_call` takes the place of every Python kernel, in all threads. Checked mode rests meanwhile."""

    def hook(
        body: Callable[..., None],
        direct: bool,
        ctx: _ext.ExecutionContext,
        outputs: tuple[_ext.Buffer, ...],
        inputs: tuple[_ext.Buffer, ...],
    ) -> None:
        on_call(KernelCall(body, direct, ctx, outputs, inputs))

    _ext.set_checked_call(hook)
    try:
        yield
    finally:
        _checked.resume()
