"""What of a kernel's functions makes it another kernel."""

import beartype
import jaxtyping

import eqxcallback as eqxc
from eqxcallback.backends._description import description


def described(grid):
    source = "__global__ void nothing() {}"
    return description(eqxc.CudaKernel(source=source, entry="nothing", launch=eqxc.Launch(grid, 32)), "op")


def test_a_check_of_annotations_does_not():
    def grid(x: int) -> int:
        return x + 1

    assert described(jaxtyping.jaxtyped(typechecker=beartype.beartype)(grid)) == described(grid)
