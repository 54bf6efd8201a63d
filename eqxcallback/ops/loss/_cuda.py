"""Cross-entropy of a softmax. See loss.cu."""

import math
from typing import Any

from ...core import ShapeAndDtype
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, block_of_rows, ceil, name, of_first
from .._supports import floats


# No label is that: labels have 32 bits.
_NO_LABEL = 2**62

# The threads of a row. With twice as many, and their registers, no second block would be resident.
_MOST_THREADS = 512


def _rows(logits: ShapeAndDtype) -> int:
    return math.prod(logits.shape[:-1])


def _first(function: Any) -> Any:
    return lambda logits, *_, **__: function(logits)


def _z_loss(*_: object, z_loss: float = 0.0, **__: object) -> float:
    return z_loss


def _label_smoothing(*_: object, label_smoothing: float = 0.0, **__: object) -> float:
    return label_smoothing


def _ignore_index(*_: object, ignore_index: int | None = None, **__: object) -> int:
    return _NO_LABEL if ignore_index is None else ignore_index


def _has_options(**options: Any) -> bool:
    return bool(_label_smoothing(**options) or _z_loss(**options)) or _ignore_index(**options) != _NO_LABEL


def _block(logits: ShapeAndDtype) -> tuple[int, int]:
    """Rows of one warp share a block; others have one each, for its barriers."""
    threads, rows = block_of_rows(logits, packs=4, most=_MOST_THREADS, least=128)
    return threads, rows if threads == 32 else 1


def _kernel(entry: Any, of_logits: Any, options: dict[str, Any]) -> CudaKernel:
    """`of_logits`: a function of them as one of what the kernel's functions are called with."""

    def blocks(logits: ShapeAndDtype) -> int:
        return ceil(_rows(logits), _block(logits)[1])

    return CudaKernel(
        FOLDER / "loss" / "loss.cu",
        entry,
        Launch(grid=of_logits(blocks), block=of_logits(_block)),
        scalars={
            "rows": ("int64", of_logits(_rows)),
            "size": ("int64", of_logits(lambda logits: logits.shape[-1])),
            **options,
        },
        supports=floats,
    )


def _of_labels(what: str, of_logits: Any) -> CudaKernel:
    def entry(*args: object, **options: object) -> str:
        return of_logits(lambda logits: name(f"cross_entropy{what}", logits, _has_options(**options)))(*args)

    options = {
        "label_smoothing": ("float32", _label_smoothing),
        "z_loss": ("float32", _z_loss),
        "ignore_index": ("int64", _ignore_index),
    }
    return _kernel(entry, of_logits, options)


def _of_targets(what: str, of_logits: Any) -> CudaKernel:
    entry = of_logits(lambda logits: name(f"cross_entropy_of_targets{what}", logits))
    return _kernel(entry, of_logits, {"z_loss": ("float32", _z_loss)})


CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD = _of_labels("", _first), _of_labels("_backward", of_first)
OF_TARGETS, OF_TARGETS_BACKWARD = _of_targets("", _first), _of_targets("_backward", of_first)
