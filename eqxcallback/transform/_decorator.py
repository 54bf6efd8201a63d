"""The shortest way from a function to an op."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..core import PyTree, callable_name
from ..kernel import PythonKernel, TritonKernel
from ._op import Op


def op(
    *misplaced: object,
    reference: Callable[..., PyTree] | None = None,
    platforms: str | Sequence[str] | None = None,
    **fields: Any,
) -> Callable[[object], Op]:
    """A decorator that makes an [`eqxcallback.Op`][] of its kernel.

    !!! example

        ```python
        @eqxcallback.op(reference=lambda x, y, *, a: a * x + y, vmap_method="broadcast_all")
        def saxpy(ctx, out, x, y, *, a):
            np.multiply(x, a, out=np.asarray(out))
            np.asarray(out)[...] += y

        z = saxpy(x, y, a=2.0)
        ```

    The function below it is the body of an [`eqxcallback.PythonKernel`][], or the function of an
    [`eqxcallback.TritonKernel`][], and the op has its name.

    **Arguments:**

    - `reference`: of the op. Without one, pass an `out_type`.
    - `platforms`: where the kernel runs. By default `"cuda"` for a function of Triton, and else `"cpu"`.
    - `fields`: what else the op has, such as `vmap_method`, `backward` or `sharding`, and what the kernel has, such as
        `out_type` and `aliases`, or of one in Triton its `grid`, `scalars` and `constexprs`.

    **Raises:** `TypeError` for what neither of them has, and what they raise.
    """
    if misplaced:
        raise TypeError(
            f"eqxcallback.op: expected fields by name; got {misplaced[0]!r}. Write @eqxcallback.op(reference=...), with its "
            "brackets."
        )

    def made(fn: Any) -> Op:
        kind = TritonKernel if hasattr(fn, "arg_names") else PythonKernel
        of_op, of_kernel = (_fields(owner) for owner in (Op, kind))
        if unknown := [name for name in fields if name not in of_op | of_kernel]:
            raise TypeError(
                f"eqxcallback.op: expected a field of Op or {kind.__name__}; got {unknown[0]!r}. There are "
                f"{', '.join(sorted(of_op | of_kernel))}."
            )
        kernel: Any = kind(fn, **{name: value for name, value in fields.items() if name in of_kernel})
        where = platforms or ("cuda" if kind is TritonKernel else "cpu")
        kernels: dict[str, Any] = dict.fromkeys((where,) if isinstance(where, str) else where, kernel)
        return Op(
            fields.get("name") or callable_name(fn).rpartition(".")[2],
            kernels=kernels,
            reference=reference,
            **{name: value for name, value in fields.items() if name in of_op and name != "name"},
        )

    return made


def _fields(kind: type) -> set[str]:
    """Return the names of the fields that a caller may give."""
    filled = {"kernels", "reference", "body", "fn"}
    return {field.name for field in dataclasses.fields(kind) if field.init} - filled
