"""Choose which of an op's kernels runs a call."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from ..backends import BoundKernel
from ..core import Types, Value
from ..kernel import Kernel


Implementation = Literal[
    "auto", "reference", "native", "c", "numba", "tvm_ffi", "python", "jax", "cuda", "image", "triton"
]
"""The kind of kernels that runs; see [`eqxcallback.Op.using`][]."""
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """**Attributes:**

    - `kernel`: the one that runs, or `None` for the reference.
    - `reasons`: for each kernel before it, its name and why it does not run.
    """

    kernel: BoundKernel | None
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return self.text_of("")

    def text_of(self, implementation: str) -> str:
        """The reasons of the kernels of one kind."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons if name.startswith(implementation))


def check_reason(answer: object, what: str) -> str | None:
    """The reason that `supports` gives, or `None` for `True`."""
    if answer is True:
        return None
    if isinstance(answer, str) and answer:
        return answer
    raise TypeError(f"{what}: expected True, or the reason why not as a text; got {answer!r}.")


def check_implementation(
    implementation: str, who: str, kernels: Mapping[str, Iterable[Kernel]], reference: object
) -> None:
    """There is one of that name."""
    if implementation == "auto":
        return
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{who}: expected implementation to be one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}."
        )
    if implementation == "reference":
        if reference is None:
            raise ValueError(f'{who}: there is no reference; implementation="reference" needs one.')
        return
    platforms: dict[str, list[str]] = {}
    for platform, candidates in kernels.items():
        for kernel in candidates:
            platforms.setdefault(kernel.backend, []).append(platform)
    if implementation not in platforms:
        texts = [f"{backend} ({', '.join(dict.fromkeys(names))})" for backend, names in platforms.items()]
        available = ", ".join(["auto", *(["reference"] if reference is not None else []), *texts])
        raise ValueError(
            f"{who}: expected implementation to be one that there is a kernel of: {available}; got {implementation!r}."
        )


def named_types(names: Sequence[str], args: Sequence[Value]) -> Types:
    """`args` as a named tuple, as `supports` takes them. What was not given is `None`."""
    fields = (*names, *(f"arg{i}" for i in range(len(names), len(args))))
    return _tuple_of(fields)(*args, *[None] * (len(fields) - len(args)))


@functools.lru_cache(maxsize=1024)
def _tuple_of(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Types", names, rename=True)
