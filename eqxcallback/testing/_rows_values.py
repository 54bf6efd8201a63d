"""The results of calls that are not transformed."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax

from ..core import Value, raising
from ._findings import Findings, NotApplicable, host, unwritten_aside
from ._subject import Subject, is_x64, structure_text


_THREADS = 8
_CALLS = 4  # by each thread, eager and compiled


DOES_NOTHING = (
    "expected a call to return arrays, or to have a side effect; it does neither, so there is nothing to compare. Return the "
    "results, from the reference too, or declare has_side_effect"
)


def does_nothing(subject: Subject) -> bool:
    """True if a call has no results and no effects. One that cannot be traced has an error, for the rows to say."""
    try:
        jaxpr = jax.make_jaxpr(subject.call)(*subject.arrays())
    except Exception:
        return False
    return not jaxpr.out_avals and not jaxpr.effects


def types(subject: Subject, findings: Findings) -> None:
    """The reference, `out_type` and what a call returns have one type."""
    arrays = subject.arrays()
    says = jax.eval_shape(subject.call_tree, *arrays)
    if subject.reference_tree is not None:
        means = jax.eval_shape(subject.reference_tree, *arrays)
        if structure_text(says) != structure_text(means):
            findings.fault(f"the tree of results is {structure_text(says)}; of the reference's {structure_text(means)}")
        _same_types(findings, jax.tree.leaves(says), jax.tree.leaves(means), "the reference has")
    with unwritten_aside():
        _same_types(findings, subject.call(*arrays), subject.result_types, "its type is")


def _same_types(findings: Findings, got: Sequence[Value], want: Sequence[Value], what: str) -> None:
    a, b = ([f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves if hasattr(leaf, "dtype")] for leaves in (got, want))
    if a != b:
        findings.fault(f"a call returns {', '.join(a)}; {what} {', '.join(b)}")


def reference(subject: Subject, findings: Findings) -> None:
    """An eager call is what the reference is, of two examples."""
    if subject.reference is None:
        raise NotApplicable("no reference")
    for number in range(2):
        findings.close(
            subject.call(*subject.arrays(number)), subject.jitted_reference(*subject.arrays(number)), _text(number)
        )


def jit(subject: Subject, findings: Findings) -> None:
    """A compiled call is what an eager one is."""
    for number in range(2):
        findings.close(subject.jitted(*subject.arrays(number)), subject.call(*subject.arrays(number)), _text(number))


def determinism(subject: Subject, findings: Findings) -> None:
    """The same call has the same bits."""
    for how, call in (("eager calls", subject.call), ("compiled calls", subject.jitted)):
        first = _hosts(call(*subject.arrays()))
        for _ in range(3):
            findings.same_bits(_hosts(call(*subject.arrays())), first, f"{how} of the same arrays")


def stateless(subject: Subject, findings: Findings) -> None:
    """A call leaves nothing behind that another one sees."""
    first = _hosts(subject.call(*subject.arrays()))
    for call in (subject.call, subject.jitted):
        other = _hosts(call(*subject.arrays(1)))
        if subject.reference is not None and _is_right(subject, findings, first):
            want = subject.jitted_reference(*subject.arrays(1))
            findings.close(other, want, "a call with other arrays, after one that is right")
        findings.same_bits(_hosts(subject.call(*subject.arrays())), first, "the same call, after one with other arrays")


def _is_right(subject: Subject, findings: Findings, results: Sequence[Value]) -> bool:
    """True if results are those of the reference. If they are wrong anyway, that is not for this row to say."""
    compared = Findings(findings.tolerance)
    compared.close(results, subject.jitted_reference(*subject.arrays()), "")
    return not compared.faults


def threads(subject: Subject, findings: Findings) -> None:
    """Calls from several threads at once do not disturb each other."""
    examples = [subject.arrays(number) for number in range(_THREADS)]
    want = [_hosts(subject.jitted(*example)) for example in examples]
    got: list[list[Any]] = [[] for _ in range(_THREADS)]
    barrier = threading.Barrier(_THREADS)
    x64 = is_x64()  # each thread has a setting of its own

    def run(number: int) -> None:
        barrier.wait()
        for call in (subject.call, subject.jitted) * _CALLS:
            try:
                with jax.enable_x64(x64), raising():
                    got[number].append(_hosts(call(*examples[number])))
            except Exception as error:
                got[number].append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # kernels are short: with Python's own 5 ms, threads would hardly meet in one
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    for number, results in enumerate(got):
        for result in results:
            with findings.case(f"thread {number}"):
                if isinstance(result, Exception):
                    raise result
                findings.close(result, want[number], f"thread {number}")


def _text(number: int) -> str:
    return "other values" if number else "the example"


def _hosts(arrays: Sequence[Value]) -> list[Any]:
    return [host(array) for array in arrays]
