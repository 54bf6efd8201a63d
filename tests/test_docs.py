"""Every Python example in the README and in docs/ runs, in order, one namespace for each page."""

import itertools
import json
import pathlib
import re
import shlex
import shutil
import warnings

import jax
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


NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebooks(notebook, monkeypatch):
    """`make docs` keeps what they have printed for the pages. Here they run in this process, within a few seconds each."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
    cells = json.loads(notebook.read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert codes
    namespace = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have them
        for number, code in enumerate(codes, 1):
            exec(compile(code, f"{notebook.name}, code {number}", "exec"), namespace)


def anchors(page):
    """Names of the headings of a page, as the site and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", page.read_text()):
            if target.startswith("https://"):
                continue
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


# Options of programs that take a file, which a reader has to have.
TAKES_A_FILE = {"--file", "--prompts", "--prompt-file", "--text", "--adapter"}


def commands(page):
    """Yield `(module, words, line)` for each command of `models/` on a page."""
    text = page.read_text().replace("\\\n", " ")
    for match in re.finditer(r"^[$>] +python -m models\.(\w+)(.*)$", text, re.MULTILINE):
        line = re.sub(r" (&|> \S+|#.*)$", "", match[2].rstrip())
        yield match[1], shlex.split(line), match[0]


PAGES_OF_PROGRAMS = [page for page in PAGES if any(commands(page))]


def test_commands_of_programs_can_be_followed():
    """From a clean clone, one page after the other: a page says how to install, and no command lacks a file or finds one in the
    place of its own."""
    assert len(PAGES_OF_PROGRAMS) >= 6
    runs = {}
    for page in PAGES_OF_PROGRAMS:
        text = page.read_text()
        assert "`make demo`" in text, page.name
        assert ". .venv/bin/activate" in text, page.name
        for module, words, line in commands(page):
            where = f"{page.name}: {line}"
            pairs = dict(itertools.pairwise(words))
            for option in TAKES_A_FILE & pairs.keys():
                path = pairs[option]
                is_made = re.search(rf"(> |--output ){re.escape(path)}\s", text[: text.index(line)])
                assert (ROOT / path).exists() or is_made, where
            if module == "train" and words[0] in ("gpt", "vit"):
                run, name = (page, pairs.get("--coordinator")), pairs["--out"]
                assert name not in runs or (runs[name] == run and run[1] is not None), where  # processes of one run
                runs[name] = run
            if module == "train" and words[0] in ("resume", "sample"):
                assert words[1] in runs, where


def test_the_readme_is_short_and_has_both_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text
