"""`python -m eqxcallback new-kernel NAME`: a small package around one kernel, to begin with."""

import dataclasses
import importlib.util
import keyword
import pathlib
import re
from collections.abc import Iterator


_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_SHARED = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "benchmark.py": "benchmark.py",
    "__init__.py": "src/my_kernel/__init__.py",
    "_reference.py": "src/my_kernel/_reference.py",
    "test.py": "tests/test_my_kernel.py",
}
_COMPILER = "The machine needs a compiler, such as g++: it builds the kernel when a program first calls it."
_EMULATED = "Without a GPU, the tests run the kernel by emulation, and a program runs the reference."


@dataclasses.dataclass(frozen=True)
class _Kind:
    kernel: str  # in a sentence
    source: str  # the file to write the kernel in
    page: str  # of eqxcallback's documentation
    needs: str
    platform: str = "cpu"
    requirement: str = "eqxcallback"


KINDS = {
    "numpy": _Kind("a kernel in NumPy", "_layer.py", "Wrap your own kernel", "It needs NumPy alone."),
    "numba": _Kind(
        "a loop in Python that Numba compiles",
        "_layer.py",
        "Python functions that Numba compiles",
        "Numba compiles the kernel when a program that calls it is lowered.",
        requirement="eqxcallback[numba]",
    ),
    "c": _Kind("a C function", "kernel.c", "C functions as kernels", _COMPILER),
    "cpp": _Kind("a kernel in C++", "kernel.cc", "Native kernels", _COMPILER),
    "cuda": _Kind("a kernel in CUDA C++", "kernel.cu", "CUDA kernels", f"{_EMULATED} That takes g++.", "cuda"),
    "triton": _Kind("a Triton kernel", "_kernel.py", "Triton kernels", _EMULATED, "cuda", "eqxcallback[triton]"),
}


def new_kernel(name: str, kind: str, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Writes the package into `folder`, and yields its files. `ValueError` for a name or folder that cannot be."""
    class_name = name.title().replace("_", "")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or any(map(keyword.iskeyword, (name, class_name))):
        raise ValueError(f"expected a name for a Python module, such as my_kernel, in lower case; got {name!r}")
    if folder.exists():
        raise ValueError(f"expected a folder that is not there yet; {folder} exists. Choose another with --out")
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"expected a name that no installed module has; got {name!r}")
    words = {
        **{f"%{key}%": value for key, value in dataclasses.asdict(KINDS[kind]).items()},
        "my_kernel": name,
        "MyKernel": class_name,
    }
    files = {_TEMPLATES / "shared" / f"{template}.txt": path for template, path in _SHARED.items()}
    files |= {path: f"src/my_kernel/{path.stem}" for path in sorted((_TEMPLATES / kind).iterdir())}
    for template, path in files.items():
        text, written = template.read_text(), path
        for word, value in words.items():
            text, written = text.replace(word, value), written.replace(word, value)
        target = folder / written
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        yield target
