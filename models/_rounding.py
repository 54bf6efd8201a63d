"""Sizes in whole steps."""


def round_up(size: int, step: int) -> int:
    """The lowest multiple of `step` that is not below `size`."""
    return -(-size // step) * step
