"""Every Python example in the README and in docs/ runs, in order, one namespace for each page."""

import pathlib
import re
import shutil
import warnings

import pytest


ROOT = pathlib.Path(__file__).parents[1]
# Pages about packages that the tests do not bring, which are large.
NEEDS = {"pytorch.md": "torch"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page):
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        # Lines keep their numbers, so that a traceback points into the page.
        yield "\n" * text[: match.start(1)].count("\n") + match.group(1)


@pytest.mark.parametrize("page", [p for p in PAGES if any(examples(p))], ids=lambda page: page.name)
def test_examples(page):
    if page.name == "tvm_ffi.md":
        pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
        if shutil.which("ninja") is None:
            pytest.skip("tvm_ffi.cpp builds with ninja, which is not installed")
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{page.name} needs {NEEDS[page.name]}, which is not installed")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=NEEDS[page.name])  # of itself
    namespace = {"__name__": "__main__"}  # as in a script
    for example in examples(page):
        exec(compile(example, str(page), "exec"), namespace)


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short_and_has_both_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text
