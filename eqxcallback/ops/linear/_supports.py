"""The encodings that kernels other than those of CPUs have."""

_ENCODINGS = ("Q4_1", "Q8_0")


def has_kernels(encoding: str) -> bool | str:
    return True if encoding in _ENCODINGS else f"it has the encodings {' and '.join(_ENCODINGS)}; this is {encoding}"
