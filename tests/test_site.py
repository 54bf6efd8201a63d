"""The site has every public name and every page. `make docs` builds it, and finds links that lead nowhere."""

import importlib
import inspect
import pathlib
import re
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
