"""The rooms and their arrows, as docs/design/structure.md draws them, and the manners of files."""

import ast
import pathlib

import pytest


ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "eqxcallback"

# What each room may import of ours. A room is a folder of the package; "." is the package's own files.
ARROWS = {
    ".": {
        ".",
        "xla",
        "backends",
        "debug",
        "_ext",
        "fusion",
        "inspection",
        "kernel",
        "layer",
        "op",
        "ops",
        "nn",
        "testing",
    },
    "xla": {"xla", "_ext", "_errors", "_identity"},
    "kernel": {"kernel"},
    "backends": {"backends", "kernel", "xla", "_ext"},
    "op": {"op", "backends", "kernel", "xla", "_aliases", "_errors", "_identity"},
    "layer": {"layer", "op", "backends", "kernel", "xla", "_aliases", "_errors", "_identity"},
    "reference": {"reference"},
    "ops": {"ops", "op", "reference", "kernel", "kernels", "_checks"},
    "kernels": {"kernels", "kernel"},
    "nn": {"nn", "ops", "_adopt", "_checks"},
    "fusion": {"fusion", "nn", "_adopt"},
    "compat": {"compat", "_ext", "_aliases", "_identity", "_buffer_callback", "debug"},
    "inspection": {"inspection", "op", "xla", "layer", "backends", "_errors", "_jit_captured"},
    "debug": {"debug", "_ext", "_errors", "_identity", "xla"},
    "testing": {"testing", "layer", "op", "kernel", "debug", "xla", "_errors", "_export"},
}
JAX_INTERNALS = ("jax._src", "jax.interpreters", "jax.extend", "jax.ffi", "jaxlib")

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Absolute dotted names that a file imports, ours included."""
    package = ["eqxcallback", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows(path):
    assert room(path) in ARROWS, f"a new room: draw its arrows in {__file__} and docs/design/structure.md"
    allowed = ARROWS[room(path)]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "eqxcallback":
            assert parts[0] not in ("models", "tests", "benchmarks")
            continue
        target = parts[1] if len(parts) > 1 else "."
        if "." in allowed and not (PACKAGE / target).is_dir():
            continue
        assert target in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_xla_touches_the_insides_of_jax(path):
    if room(path) == "xla":
        return
    assert not [name for name in imports(path) if name.startswith(JAX_INTERNALS)]
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert not [node for node in attributes if ast.unparse(node).startswith(JAX_INTERNALS)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_imports_of_jax_give_their_reason(path):
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if "import" in line and ("jax._src" in line or "from jaxlib" in line):
            above = []
            for previous in reversed(lines[:number]):
                if not previous.startswith("#"):
                    break
                above.append(previous)
            assert any("Noticed by: tests/" in comment for comment in above), f"{path.name}:{number + 1}"


@pytest.mark.parametrize(
    "path",
    [*FILES, *sorted((ROOT / "csrc").rglob("*.cc")), *sorted((ROOT / "csrc").rglob("*.h"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_are_short_and_say_what_they_are_for(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert text.startswith(('"""', "//", "#include"))


def test_public_names():
    import eqxcallback

    public = {name for name in vars(eqxcallback) if not name.startswith("_")}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert public - rooms == {
        "Buffer",
        "CudaKernel",
        "ExecutionContext",
        "ExecutionStage",
        "KernelError",
        "KernelHandle",
        "Launch",
        "Layer",
        "NativeKernel",
        "Op",
        "PythonKernel",
        "TritonKernel",
        "available_backends",
        "buffer_callback",
        "export",
        "fuse",
        "inspect",
        "jit_captured",
        "raising",
        "unfuse",
    }


def test_importing_starts_no_backend_and_needs_no_gpu_library():
    import subprocess
    import sys

    code = (
        "import sys, eqxcallback; from jax._src import xla_bridge; "
        "assert not xla_bridge._backends, 'a backend was started'; "
        "assert not {'cupy', 'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
