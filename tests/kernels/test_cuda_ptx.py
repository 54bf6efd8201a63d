"""Every file of CUDA C++, by each compiler: one instance of each kernel compiles to PTX.

That takes seconds, where machine code takes minutes: whole in every run, so that no file goes unseen by CUDA 12.
"""

import pytest

from .. import cuda12
from . import kernels
from .compiling import ptx, unavailable
from .kernels import BF16


pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


@pytest.mark.parametrize("compiler", cuda12.COMPILERS)
@pytest.mark.parametrize("file", kernels.FILES)
def test_every_file_compiles_to_ptx(file, compiler, monkeypatch):
    cuda12.use(compiler, monkeypatch)
    of_each = {name.partition("<")[0]: f"eqxcallback::{name}" for name in kernels.entries(file, [BF16])}
    text = ptx(kernels.FOLDER / file, *of_each.values())
    assert text.count(" .entry ") == len(of_each)


def test_no_file_is_forgotten():
    assert set(kernels.FILES) == {path.relative_to(kernels.FOLDER).as_posix() for path in kernels.FOLDER.rglob("*.cu")}
