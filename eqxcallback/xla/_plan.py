"""What a kernel becomes when a program that calls it is lowered."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One custom call.

    **Attributes:**

    - `target`: the name of a registered handler.
    - `attributes`: typed values, see `_attributes.py`.
    - `aliases`: pairs of flat operand and result indices.
    """

    target: str
    attributes: Mapping[str, Any]
    aliases: tuple[tuple[int, int], ...] = ()
