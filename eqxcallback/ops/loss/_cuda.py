"""Cross-entropy of a softmax. See loss.cu."""

import math
from typing import Any

from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, block_of_rows, ceil, name, of_first
from .._supports import floats


def _rows(logits: Any) -> int:
    return math.prod(logits.shape[:-1])


def _block(logits: Any) -> tuple[int, int]:
    return block_of_rows(logits, packs=4, most=1024, least=128)


def _blocks(logits: Any) -> int:
    return ceil(_rows(logits), _block(logits)[1])


def _first(function: Any) -> Any:
    return lambda logits, labels, **_: function(logits)


def _supports(
    types: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int | None = None, **options: Any
) -> bool | str:
    given = {
        "label smoothing": bool(label_smoothing),
        "z loss": bool(z_loss),
        "label to ignore": ignore_index is not None,
    }
    lacking = next((what for what, is_given in given.items() if is_given), None)
    return floats(types, **options) if lacking is None else f"it has no {lacking}"


def _kernel(what: str, of_logits: Any) -> CudaKernel:
    """`of_logits`: a function of them as one of what the kernel's functions are called with."""
    return CudaKernel(
        FOLDER / "loss" / "loss.cu",
        of_logits(lambda logits: name(f"cross_entropy{what}", logits)),
        Launch(grid=of_logits(_blocks), block=of_logits(_block)),
        scalars={
            "rows": ("int64", of_logits(_rows)),
            "size": ("int64", of_logits(lambda logits: logits.shape[-1])),
        },
        supports=_supports,
    )


CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD = _kernel("", _first), _kernel("_backward", of_first)
