"""The rooms and their arrows, as docs/design/structure.md draws them, and the manners of files."""

import ast
import pathlib

import pytest


ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "eqxcallback"

FAMILIES = sorted(path.parent.name for path in PACKAGE.glob("ops/*/__init__.py"))

# The parts of xla/, which import one way; all of them may import the extension and core/.
XLA = {
    "xla.types": set(),
    "xla.handles": {"xla.types"},
    "xla.calls": {"xla.types", "xla.handles"},
    "xla.programs": {"xla.types", "xla.handles", "xla.calls"},
}
# What each room may import of ours. A room is a folder of the package, a part of xla/, or a family of ops/; "." is the
# package's own files, which are its face.
ARROWS = {
    ".": {"_ext", "backends", "callback", "core", "debug", "fusion", "inspection", "kernel", "layer", "nn", "ops"}
    | {"program", "testing", "transform", "xla"},
    "core": set(),
    "kernel": set(),
    **{room: {*others, "core", "_ext"} for room, others in XLA.items()},
    "xla": set(XLA),
    "emulation": {"core"},
    "backends": {"emulation", "kernel", "xla", "core", "_ext"},
    "transform": {"backends", "kernel", "xla", "core"},
    "layer": {"transform", "backends", "kernel", "xla", "core"},
    "ops": {*(f"ops.{family}" for family in FAMILIES), "transform", "kernel", "core"},
    # A family uses what ops/ has for all of them, and no other family.
    **{f"ops.{family}": {"ops", "transform", "kernel", "core"} for family in FAMILIES},
    "nn": {"ops", "core"},
    "fusion": {"nn", "ops", "core"},
    "callback": {"xla", "core"},
    "program": {"xla", "core", "backends", "layer", "ops", "transform", "_ext"},
    "compat": {"callback", "core", "debug", "_ext"},
    "inspection": {"_ext", "transform", "xla", "backends", "core", "program"},
    "debug": {"_ext", "core", "xla"},
    "testing": {"emulation", "layer", "transform", "kernel", "debug", "xla", "core", "program"},
}
JAX_INTERNALS = ("jax._src", "jax.interpreters", "jax.extend", "jax.ffi", "jaxlib")

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Absolute dotted names that a file imports, ours included."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(path):
    return room_of(["eqxcallback", *path.relative_to(PACKAGE).with_suffix("").parts])


def room_of(parts):
    """The room of a module, or of a name that is imported from one."""
    folders = [part for i, part in enumerate(parts[1:], 1) if PACKAGE.joinpath(*parts[1 : i + 1]).is_dir()]
    if not folders:
        return "_ext" if parts[1:2] == ["_ext"] else "."
    if len(folders) > 1 and folders[0] in ("xla", "ops"):
        return ".".join(folders[:2])
    return folders[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows(path):
    here = room(path)
    assert here in ARROWS, f"a new room: draw its arrows in {__file__} and docs/design/structure.md"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "eqxcallback":
            assert parts[0] not in ("models", "tests", "benchmarks")
            continue
        target = room_of(parts)
        assert target == here or target in ARROWS[here], f"{path.name} imports {name}"


# What each folder of models/ may import of the others; "." is the files beside the folders: the models, and what all programs
# share. Nothing imports a program.
MODELS = {
    ".": {"tokens"},
    "tokens": {"."},
    "parallel": {"."},
    "decoding": {"parallel", "tokens", "."},
    **{program: {"decoding", "parallel", "tokens", "."} for program in ("generate", "serve")},
    "finetune": {"tokens", "."},
    "train": {"decoding", "parallel", "."},
}


@pytest.mark.parametrize("folder", MODELS)
def test_arrows_of_models(folder):
    root = ROOT / "models"
    assert {path.parent.name for path in root.glob("*/__init__.py")} == MODELS.keys() - {"."}
    for path in (root / folder).glob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "models":
                target = parts[1] if (root / parts[1]).is_dir() else "."
                assert target == folder or target in MODELS[folder], f"{path.name} imports {name}"


def test_the_arrows_have_no_circle():
    """A family and what families share are one floor."""
    arrows = {room: others for room, others in ARROWS.items() if room != "." and not room.startswith("ops.")}
    above: dict[str, set[str]] = {
        room: {other for other in others if other in arrows} for room, others in arrows.items()
    }
    while above:
        lowest = [room for room, others in above.items() if not others & set(above)]
        assert lowest, f"a circle among {sorted(above)}"
        for room in lowest:
            del above[room]


REFERENCES = [path for path in FILES if path.name.startswith("_reference")]


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_reference_imports_nothing_of_ours(path):
    """But other references, and the precision that all compute in."""
    ours = [name for name in imports(path) if name.startswith("eqxcallback")]
    assert not [
        name for name in ours if not any(part.startswith(("_reference", "_precision")) for part in name.split("."))
    ]


def test_every_family_has_a_reference():
    assert {path.parent.name for path in REFERENCES} >= set(FAMILIES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_xla_touches_the_insides_of_jax(path):
    if room(path).split(".")[0] == "xla":
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


SOURCES = [path for suffix in ("cc", "h") for path in sorted((ROOT / "csrc").rglob(f"*.{suffix}"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", [*FILES, *SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are_for(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert text.startswith(('"""', "//", "#include"))


def test_public_names():
    import eqxcallback

    public = {name for name in vars(eqxcallback) if not name.startswith("_")}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert public - rooms - {"jaxtyping"} == {  # which its import hook adds
        "Buffer",
        "CKernel",
        "CudaKernel",
        "ExecutionContext",
        "ExecutionStage",
        "FuseRule",
        "ImageKernel",
        "JaxKernel",
        "KernelError",
        "KernelHandle",
        "Launch",
        "Layer",
        "NativeKernel",
        "NumbaKernel",
        "Op",
        "PerformanceWarning",
        "PythonKernel",
        "TensorMap",
        "TritonKernel",
        "Tuned",
        "TvmFfiKernel",
        "available_backends",
        "buffer_callback",
        "export",
        "fuse",
        "inspect",
        "jit_captured",
        "load",
        "op",
        "raising",
        "save_only_these_kernels",
        "tune",
        "unfuse",
        "use_huge_pages",
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
