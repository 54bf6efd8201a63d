"""Results as they are kept in the repository: of each row what the pages show."""

from collections.abc import Mapping
from typing import Any

from ._rows import OURS, best_of_row


def kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's medians, in `figures`, and of ours the quartiles and the memory. Of XLA the memory too."""
    shown = {best_of_row(row).get(name) for name in (OURS, "XLA")}
    return {
        **row,
        "seconds": {name: seconds for name, seconds in row["seconds"].items() if name.startswith(OURS)},
        "memory": {name: {"peak": memory["peak"]} for name, memory in row["memory"].items() if name in shown},
    }
