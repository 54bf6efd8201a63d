"""Plans of a GPU that is there, against those of the described one. Imports no JAX: who compares need not have it."""

from collections.abc import Mapping
from typing import Any


# What both have to say. Which kernels XLA makes of its own code depends on what it has tried out on the GPU.
SAME = ("captured", "copies", "command_buffers")


def compare(real: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """Say in lines where two plans differ."""
    lines = []
    for name in {**real, **described}:
        sides = {"on the GPU": real.get(name), "on the described one": described.get(name)}
        missing = {side: (plan or {"error": "not compiled"}).get("error") for side, plan in sides.items()}
        lines += [f"{name}: {side}: {why}" for side, why in missing.items() if why is not None]
        if all(why is None for why in missing.values()):
            first, second = real[name], described[name]
            lines += [
                f"{name}: {what}: {first[what]} on the GPU, {second[what]} on the described one"
                for what in SAME
                if first[what] != second[what]
            ]
    return lines
