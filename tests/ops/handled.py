"""Words for the tables of handlers, <family>/handled.py, and all of them as one."""

import importlib
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np


BF16 = ml_dtypes.bfloat16
OF_TYPES = r"gradients of the types of the operands; got "


def a(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def i32(*shape: int) -> np.ndarray:
    return a(*shape, dtype=np.int32)


def u8(*shape: int) -> np.ndarray:
    return a(*shape, dtype=np.uint8)


def i8(*shape: int) -> np.ndarray:
    return a(*shape, dtype=np.int8)


def mask(slots: Iterable[int]) -> int:
    return sum(1 << slot for slot in slots)


def present(*slots: int, **options: Any) -> dict[str, Any]:
    """`options`, and the mask of these operands."""
    return {**options, "present": np.int64(mask(slots))}


def needs(slots: Iterable[int], gradients: Iterable[int], **options: Any) -> dict[str, Any]:
    """The masks of operands and of gradients."""
    return {**present(*slots, **options), "needs_grad": np.int64(mask(gradients))}


def of_every_family(table: str) -> list[Any]:
    """`HANDLED`: by a name that begins with the symbol, operands, results and attributes that a handler takes. `NOT_HANDLED`:
    symbols and what these refuse, with the message."""
    folders = sorted(path.parent.name for path in pathlib.Path(__file__).parent.glob("*/handled.py"))
    return [getattr(importlib.import_module(f"{__package__}.{folder}.handled"), table) for folder in folders]
