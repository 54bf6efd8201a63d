"""Cross-entropy of a softmax. See cuda/cross_entropy.cu."""

import math
from typing import Any

from ..kernel import CudaKernel, Launch
from ._geometry import FOLDER, block_of_rows, ceil, name, of_first


def _rows(logits: Any) -> int:
    return math.prod(logits.shape[:-1])


def _block(logits: Any) -> tuple[int, int]:
    return block_of_rows(logits, packs=4, most=1024, least=128)


def _blocks(logits: Any) -> int:
    return ceil(_rows(logits), _block(logits)[1])


def _first(function: Any) -> Any:
    return lambda logits, labels: function(logits)


def _kernel(what: str, of_logits: Any) -> CudaKernel:
    """`of_logits`: a function of them as one of what the kernel's functions are called with."""
    return CudaKernel(
        FOLDER / "cross_entropy.cu",
        of_logits(lambda logits: name(f"cross_entropy{what}", logits)),
        Launch(grid=of_logits(_blocks), block=of_logits(_block)),
        scalars={
            "rows": ("int64", of_logits(_rows)),
            "size": ("int64", of_logits(lambda logits: logits.shape[-1])),
        },
    )


CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD = _kernel("", _first), _kernel("_backward", of_first)
