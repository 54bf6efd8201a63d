"""The site has every public name and every page. `make docs` builds it, and finds links that lead nowhere."""

import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
import types

import pytest


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Modules that others import from theirs, and so have more names than their own.
COMPAT = {
    "eqxcallback.compat.buffer_callback": {"buffer_callback"},
    "eqxcallback.compat.host_callback": {
        "CallbackException",
        "CallbackFlavor",
        "TapFunctionException",
        "barrier_wait",
        "call",
        "id_print",
        "id_tap",
        "stop_outfeed_receiver",
    },
}
ROOMS = ("eqxcallback", "eqxcallback.nn", "eqxcallback.ops", "eqxcallback.testing", "eqxcallback.debug", *COMPAT)


def public_names(room):
    """Names that stand for something of ours. Equinox documents what `nn` has of it."""
    for name, value in vars(importlib.import_module(room)).items():
        is_theirs = getattr(value, "__module__", "").startswith("equinox")
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and not is_theirs:
            yield name


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_an_api_page(room):
    names = COMPAT.get(room) or set(public_names(room))
    assert names
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    # A function that has the name of its folder stands behind it: the reader of sources takes the shorter name for the folder.
    documented = re.findall(rf"^::: {re.escape(room)}\.(\w+)(?:\.\1)?$", text, re.MULTILINE)
    assert sorted(documented) == sorted(names), f"docs/api has `::: {room}.NAME` once for each public name"
    for name in names:
        is_folder = (ROOT / room.replace(".", "/") / name).is_dir()
        assert (f"::: {room}.{name}.{name}\n" in text) == is_folder, name
        assert (f"{{#{room}.{name}}}\n" in text) == is_folder, f"an anchor, to which docstrings refer as {room}.{name}"


def test_the_api_has_more_than_names():
    """A page shows docstrings: mkdocstrings leaves out the rest."""
    for room in ROOMS[:5]:
        for name in public_names(room):
            value = getattr(importlib.import_module(room), name)
            if inspect.isclass(value) or inspect.isroutine(value):
                assert value.__doc__, f"{room}.{name}"


def test_every_page_has_a_place_on_the_site():
    nav = re.findall(r"(\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], re.MULTILINE)
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb")]
    assert sorted(nav) == sorted(pages), "mkdocs.yml: `nav` has each page of docs/ once"


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    """The hooks of a small checkout, in place of the packages that build the site; and how often a notebook ran."""
    ran = []

    class Client:
        def __init__(self, notebook, **_):
            self.notebook = notebook

        def execute(self, **_):
            ran.append(self.notebook["text"])
            if "raise" in self.notebook["text"]:
                raise ValueError("a cell")
            self.notebook["text"] += f", run {len(ran)}"

    plugins = types.SimpleNamespace(event_priority=lambda _: lambda function: function)
    formats = types.SimpleNamespace(reads=lambda text, **_: {"text": text}, writes=lambda notebook: notebook["text"])
    modules = {"mkdocs.plugins": plugins, "nbformat": formats, "nbclient": types.SimpleNamespace(NotebookClient=Client)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "KEPT", tmp_path / "build" / "site")
    for name in ("eqxcallback/ops.py", "models/llama.py", "csrc/copy.cc", "docs/some.ipynb"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first")
    return module, ran


@pytest.mark.parametrize("changed", ["docs/some.ipynb", "eqxcallback/ops.py", "models/llama.py", "csrc/copy.cc"])
def test_a_notebook_runs_when_it_or_the_library_has_changed(hooks, tmp_path, changed):
    module, ran = hooks
    notebook = tmp_path / "docs" / "some.ipynb"
    assert [module.run(notebook), module.run(notebook)] == ["first, run 1"] * 2
    (tmp_path / "eqxcallback" / "__pycache__").mkdir()
    (tmp_path / "eqxcallback" / "__pycache__" / "ops.pyc").touch()
    assert module.run(notebook) == "first, run 1"
    (tmp_path / changed).write_text("second")
    assert module.run(notebook).endswith(", run 2")
    assert len(ran) == 2
    assert len(list(module.KEPT.iterdir())) == 1  # the older one is removed


def test_a_notebook_that_fails_leaves_nothing(hooks, tmp_path):
    module, _ = hooks
    notebook = tmp_path / "docs" / "some.ipynb"
    notebook.write_text("raise")
    with pytest.raises(ValueError, match="a cell"):
        module.run(notebook)
    assert list(module.KEPT.iterdir()) == []


def test_half_a_file_is_not_taken_for_a_whole_one(hooks):
    module, _ = hooks

    def stops(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._made_once("plot.svg", "data", stops)
    assert module._made_once("plot.svg", "data", lambda path: path.write_text("whole")) == "whole"
