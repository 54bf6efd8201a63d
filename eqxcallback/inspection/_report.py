"""What an inspection says."""

import dataclasses

from ..xla import KernelHandle
from ._table import table


@dataclasses.dataclass(frozen=True)
class Alias:
    """A result that overwrites an operand.

    **Attributes:**

    - `operand`, `result`: flat indices over the operands and results of the kernel.
    - `state`: `"in place"`, `"copied"` (XLA copies the operand first), or `None` where only a compiled program can tell.
    - `reason`: why it is copied: `"not donated"`, an argument of the program that the caller keeps; `"live later"`, somebody
        in the program still needs the operand; `"a constant"`; `"XLA's choice"`, nothing of these, as where the memory of a
        donated argument was given to another result.
    """

    operand: int
    result: int
    state: str | None
    reason: str = ""

    def __str__(self) -> str:
        state = "unknown until compiled" if self.state is None else self.state
        return f"operand {self.operand} -> result {self.result}: {state}" + (f" ({self.reason})" if self.reason else "")


@dataclasses.dataclass(frozen=True)
class ExternalCall:
    """A call in a program that leaves what XLA has compiled, or would do so on another platform.

    **Attributes:**

    - `path`: the path of transformations, named scopes and layers down to it.
    - `op`: the name of the layer, of the op, or of the callback.
    - `kind`: `"forward"`, `"jvp"`, `"vjp"`, or `"callback"` for what has no derivative of its own.
    - `lane`: `"native"` (C++ alone), `"python"`, `"reference"` (no kernel: the definition, compiled by XLA), and for JAX's
        own calls `"ffi"` or `"jax callback"`.
    - `target`: the name of XLA's custom call, or `None`.
    - `operands`, `results`: the types that the kernel sees, such as `"float32[3,4]"`. Under `vmap` with the mapped axes.
    - `in_place`: for each result that overwrites an operand, whether XLA copies the operand first.
    - `captured`, `captured_reason`: whether XLA has planned to record it into a command buffer, and how or why not. `None` where
        the program was not compiled for a GPU, and XLA would decide.
    - `fallback`: why the reference runs, or `""`.
    - `handle`: the kernel's [`eqxcallback.KernelHandle`][]; `None` where the reference runs, and for JAX's own calls.
    - `times`: how often it is called in one run of the program, or `None` if that depends on data. Branches of
        `jax.lax.cond` count as if they were taken.
    - `note`: what else there is to say, such as that XLA has removed it.
    """

    path: str
    op: str
    kind: str
    lane: str
    target: str | None
    operands: tuple[str, ...]
    results: tuple[str, ...]
    in_place: tuple[Alias, ...]
    captured: bool | None
    captured_reason: str
    fallback: str
    times: int | None
    note: str = ""
    handle: KernelHandle | None = None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The external calls of a program. Its `str` is a table.

    **Attributes:**

    - `program`: the name of the function.
    - `platform`: what it was lowered for.
    - `stage`: `"compiled"`, so that copies are known; `"lowered"`; or `"traced"`, for another platform where callbacks of JAX's
        keep it from being lowered.
    - `calls`: in the order of the program.
    - `device`: the GPU that it was compiled for, if that is only described, or `""`.
    - `not_compiled`: why not, or `""`.
    - `host_calls`: for each time that it was run, how often the host called a kernel in Python or one of our launcher. What a
        GPU replays from a command buffer it does not call.
    """

    program: str
    platform: str
    stage: str
    calls: tuple[ExternalCall, ...]
    device: str = ""
    not_compiled: str = ""
    host_calls: tuple[int, ...] = ()

    def __str__(self) -> str:
        return table(self)
