"""`check`: every transformation of a layer or an op, against what defines it."""

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from .. import debug
from ..core import AnyNumber, PyTree, Value, check_flags, integer, number, quiet, raising
from . import (
    _rows_capture as capturing,
    _rows_derivatives as derivatives,
    _rows_devices as devices,
    _rows_dtypes as dtypes,
    _rows_memory as memory,
    _rows_programs as programs,
    _rows_sizes as sizes,
    _rows_values as values,
    _rows_vmap as vmap,
)
from ._arguments import check_arguments, without_ignored_key
from ._emulated import Part, parts, refusal
from ._findings import Findings, NotApplicable, Tolerance, error_text
from ._progress import Progress
from ._report import FAILED, NOT_APPLICABLE, NOT_RUN, OK, CheckFailed, Report, Row
from ._subject import Subject, subject


_WHO = "testing.check"

# The most telling ones first: what fails in one of them fails in later ones too.
ROWS: Mapping[str, Callable[[Subject, Findings], None]] = {
    "types": values.types,
    "inputs untouched": memory.inputs_untouched,
    "outputs written": memory.outputs_written,
    "late reads": memory.late_reads,
    "attributes": memory.attributes,
    "buffers released": memory.buffers_released,
    "determinism": values.determinism,
    "stateless": values.stateless,
    "reference": values.reference,
    "jit": values.jit,
    "aliasing": memory.aliasing,
    "vmap": vmap.vmap,
    "vmap of all": vmap.vmap_all,
    "nested vmap": vmap.vmap_nested,
    "grad": derivatives.grad,
    "partial grads": derivatives.partial_grads,
    "finite differences": derivatives.finite_differences,
    "jvp": derivatives.jvp,
    "hessian": derivatives.hessian,
    "dtypes": dtypes.dtypes,
    "checkpoint": programs.checkpoint,
    "scan": programs.scan,
    "vmap of grad": programs.vmap_of_grad,
    "grad of vmap": programs.grad_of_vmap,
    "zero size": sizes.zero_size,
    "odd shapes": sizes.odd_shapes,
    "threads": values.threads,
    "sharded jit": devices.sharded_jit,
    "shard_map": devices.shard_map,
    "export": devices.export,
    "capture": capturing.capture,
}
# Rows that run only if they are asked for.
_ASKED = ("capture",)
# Rows that call kernels with types, sizes or absent gradients which no row before had. In checked mode, they survive a kernel
# that writes beyond its memory with those alone.
_CHECKED = ("partial grads", "nested vmap", "dtypes", "zero size", "odd shapes")


def check(
    layer_or_op: Callable[..., PyTree],
    *args: Value,
    reference: Callable[..., PyTree] | None = None,
    rtol: AnyNumber | None = None,
    atol: AnyNumber | None = None,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    capture: bool = False,
    seed: int = 0,
    emulate: str = "auto",
    progress: bool | None = None,
    **options: object,
) -> Report:
    r"""Try every transformation of a layer or an op, and compare with its reference, with finite differences, and with calls
    one by one.

    !!! example

        ```python
        print(eqxcallback.testing.check(Scale(jnp.ones(3)), jnp.arange(3.0)))
        ```

    **Arguments:**

    - `layer_or_op`: an [`eqxcallback.Layer`][], an [`eqxcallback.Op`][], or another Module or function in JAX.
    - `args`, `options`: of a call: one small example, such as a user passes. An op's options are static. A `key` that a
        layer does not take is left out, as calls of the layer do.
    - `reference`: in place of the subject's own; as a function of `args` and `options`.
    - `rtol`, `atol`: `|got - want| <= atol + rtol * |want|`, in all dtypes. By default `rtol` is 256 times the rounding error
        of the dtype, 8 times in 16 bits, and `atol` is `rtol` times the largest value of the array. Derivatives may err by
        four times that, and second ones by sixteen.
    - `only`, `skip`: names of rows, as the table has them.
    - `capture`: whether to have the row `capture` too, which needs a GPU.
    - `seed`: of cotangents and directions.
    - `emulate`: on a CPU, `"auto"` runs the kernels in CUDA C++ and Triton of a layer or an op by emulation: in all rows if it
        has none for the CPU, else in some more rows, `cuda: reference` and others, or in those of `only`. `"never"` does not.
        Where kernels cannot be run, their rows are `"not run"`, and the check has not passed.
    - `progress`: whether to write a line to standard error for each row. By default for each that takes more than a second, if
        standard error is a terminal.

    **Returns:** an [`eqxcallback.testing.Report`][], of which `str` is a table.

    **Rows:**

    - `types`: `out_type`, the reference and a call agree; `reference`: so do the values; `jit`: and a compiled call. A call that
        returns nothing and has no side effect fails `types`, whichever rows were chosen, and no other row is run.
    - `inputs untouched`, `outputs written`, `late reads`, `attributes`, `buffers released`: what kernels do to memory, in
        [checked mode][eqxcallback.debug.checked]: a late read is one of an operand whose memory a result has overwritten, and
        attributes are those of a native kernel, which it has to read. `aliasing`: what results overwrite is donated or
        copied. A kernel that writes beyond its memory, crashes, or does not end fails `inputs untouched`, whichever rows were
        chosen, and no other row is run: the process could die of it.
    - `determinism`: the same call has the same bits; `stateless`: and after another call; `threads`: and beside others.
    - `vmap`: each array alone, along each kind of axis; `vmap of all`: together, and an ensemble of layers; `nested vmap`:
        around the same and around different arrays; `zero size`, `odd shapes`: batches of 0, 1, 7 and 17.
    - `grad`, `partial grads`, `jvp`, `hessian`: against the reference; `finite differences`: against values alone. All rows run
        with `jax.default_matmul_precision("highest")`, without which a GPU's products in f32 have ten bits.
    - `checkpoint`, `scan`, `vmap of grad`, `grad of vmap`: values and gradients of programs.
    - `dtypes`: all floating arrays, parameters too, in f16, bf16, f32 and f64. A kernel may refuse one by a `TypeError` or a
        `ValueError`.
    - `sharded jit`, `shard_map`: a batch over all devices, and in the former each array along each axis that they divide, as
        `sharding` says; `export`: a program saved and loaded.
    - `capture`: each Python kernel that is declared `command_buffer_compatible` is recorded as XLA records it, and replayed:
        what it launches elsewhere, allocates, waits for or reads on the host is named, with its line.

    **Raises:** [`eqxcallback.testing.CheckFailed`][], with the table, if a row failed. Rows come in the order in which they
    explain each other: mend the first one that failed, and check again. `TypeError` or `ValueError` for a wrong option, and
    `TypeError` for arguments that no call takes.

    **Limitations:** other examples than the given one are made of it: floating values vary by a quarter, others are moved
    along their first axis. Other shapes come from `vmap` alone. What cannot be tried on this machine is not applicable, and
    the table says why. `capture` records all Python kernels of a function if one is declared, after a first call: what a
    kernel does only once is not seen, nor is PyTorch's own pool.
    """
    _check_options(rtol, atol, capture, seed, progress)
    names = _selected(only, skip, capture)
    options = dict(without_ignored_key(layer_or_op, options))
    tolerance, shown = Tolerance(rtol, atol), Progress(progress)
    rows: list[Row] = []
    title = ""
    # What is slow is right, and no more is asked here. A GPU's products in f32 would round their factors to ten bits.
    with quiet(), jax.default_matmul_precision("highest"):
        for part in parts(layer_or_op, emulate, names, only is not None):
            it = subject(part.target, args, options, reference, seed)
            check_arguments(it, part.target, args, options, _options())
            title = (title or it.name) + part.note
            rows += _rows(part, it, tolerance, shown)
    report = Report(title, tuple(rows))
    if report.failed:
        raise CheckFailed(report)
    return report


def _check_options(rtol: object, atol: object, capture: object, seed: object, progress: object) -> None:
    for name, value in {"rtol": rtol, "atol": atol}.items():
        if value is not None:
            number(_WHO, f"{name} to be a number from 0 up, or None", value, least=0)
    integer(_WHO, "seed to be an integer from 0 up", seed, least=0)
    check_flags(_WHO, capture=capture, **({} if progress is None else {"progress": progress}))


def _options() -> list[str]:
    """The names of the options of `check` itself."""
    return [name for name, option in inspect.signature(check).parameters.items() if option.kind is option.KEYWORD_ONLY]


def _selected(only: str | Sequence[str] | None, skip: str | Sequence[str], capture: bool) -> list[str]:
    wanted = [name for name in ROWS if name not in _ASKED] if only is None else _names("only", only)
    wanted += _ASKED if capture else ()
    left_out = _names("skip", skip)
    for name in (*wanted, *left_out):
        if name not in ROWS:
            raise ValueError(f"{_WHO}: there is no row {name!r}. The rows are {', '.join(ROWS)}.")
    names = [name for name in ROWS if name in wanted and name not in left_out]
    if not names:
        raise ValueError(f"{_WHO}: only and skip leave no row to run. A check of nothing would pass.")
    return names


def _names(option: str, given: object) -> list[str]:
    if not isinstance(given, Iterable):
        raise TypeError(
            f"{_WHO}: expected {option} to have names of rows; got {given!r} of type {type(given).__name__}."
        )
    return [given] if isinstance(given, str) else list(given)


def _rows(part: Part, it: Subject, tolerance: Tolerance, shown: Progress) -> list[Row]:
    reason = part.reason or (refusal(it) if part.note else None)
    if reason is not None:
        return [Row(part.prefix + name, NOT_RUN, None, 0.0, reason) for name in part.names]
    rows = _nothing(part.names, it) or _overrun(part.names, it) or (_row(name, it, tolerance) for name in part.names)
    return [shown.row(dataclasses.replace(row, name=part.prefix + row.name)) for row in rows]


def _overrun(names: Sequence[str], it: Subject) -> tuple[Row, ...]:
    """The rows of what writes beyond its memory, or ends its process: none may run it, since this process could die of that.
    Else nothing.
    """
    start = time.perf_counter()
    faults = memory.overruns(it)
    if not faults:
        return ()
    told = Row("inputs untouched", FAILED, None, time.perf_counter() - start, "\n".join(faults))
    what = "writes beyond its memory" if any("its memory" in fault for fault in faults) else "ends its process"
    return _alone(told, names, f"not run: a kernel {what}")


def _nothing(names: Sequence[str], it: Subject) -> tuple[Row, ...]:
    """The rows of what returns nothing: they would compare nothing, and pass. Else nothing."""
    start = time.perf_counter()
    if not values.does_nothing(it):
        return ()
    told = Row("types", FAILED, None, time.perf_counter() - start, values.DOES_NOTHING)
    return _alone(told, names, "not run: there is nothing to compare")


def _alone(told: Row, names: Sequence[str], reason: str) -> tuple[Row, ...]:
    """The one row that failed, and the others that are not run for this reason."""
    rows = {name: Row(name, NOT_APPLICABLE, None, 0.0, reason) for name in names} | {told.name: told}
    return tuple(rows[name] for name in ROWS if name in rows)


def _row(name: str, it: Subject, tolerance: Tolerance) -> Row:
    findings = Findings(tolerance)
    start = time.perf_counter()
    try:
        in_mode = name in _CHECKED and memory.has_checked_mode()
        with raising(), debug.checked() if in_mode else contextlib.nullcontext():
            ROWS[name](it, findings)
    except NotApplicable as reason:
        return Row(name, NOT_APPLICABLE, findings.worst, time.perf_counter() - start, str(reason))
    except Exception as error:
        findings.fault(error_text(error))
    seconds = time.perf_counter() - start
    if findings.faults:
        return Row(name, FAILED, findings.worst, seconds, "\n".join([*findings.faults, *findings.notes]))
    return Row(name, OK, findings.worst, seconds, "; ".join(findings.notes))
