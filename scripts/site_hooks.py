"""MkDocs calls these: what the site has beside docs/. Plots of the stored results, notebooks that have run, and MathJax."""

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any


ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_plugins: Any = importlib.import_module("mkdocs.plugins")
_STACKED = "training_parts"  # whose plot is of parts, not of peers
KEPT = ROOT / "build" / "site"  # what takes long to make, by the hash of what it is made of


@_plugins.event_priority(100)  # before the plugin `ipynb`
def on_files(files: Any, config: Any) -> Any:
    """Add the plots, and run the notebooks. The plugin `ipynb` makes pages of what they leave."""
    file_class = importlib.import_module("mkdocs.structure.files").File
    for suite, svg in plots().items():
        files.append(file_class.generated(config, f"plots/{suite}.svg", content=svg))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        executed = run(ROOT / "docs" / notebook.src_uri)
        files.append(file_class.generated(config, notebook.src_uri, content=executed))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the plot of each suite in front of its table."""
    if page.file.src_uri == "performance.md":
        for suite in suites_with_plots():
            markdown = markdown.replace(f"<!-- {suite} -->\n", f"![The table as a plot](plots/{suite}.svg)\n\n")
    return markdown


def on_post_build(config: Any) -> None:
    """Copy MathJax, so that no page needs another server."""
    spec = importlib.util.find_spec("jupyter_server_mathjax")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the site: expected jupyter-server-mathjax, which has MathJax. Run make docs.")
    source = pathlib.Path(spec.origin).parent / "static"
    shutil.copytree(source, pathlib.Path(config["site_dir"]) / "mathjax", dirs_exist_ok=True)


def suites_with_plots() -> list[str]:
    sys.path.insert(0, str(ROOT))
    try:
        titles = importlib.import_module("benchmarks._suite").TITLES
    finally:
        sys.path.remove(str(ROOT))
    return [suite for suite in (*titles, _STACKED) if (RESULTS / f"{suite}.json").exists()]


def plots() -> dict[str, str]:
    """SVG for each suite that has results."""
    drawn = {}
    for suite in suites_with_plots():
        text = (RESULTS / f"{suite}.json").read_text()
        drawing = importlib.import_module("benchmarks._plot")
        program = (ROOT / "benchmarks" / "_plot.py").read_text()
        draw = functools.partial(drawing.stacked if suite == _STACKED else drawing.plot, json.loads(text))
        drawn[suite] = _made_once(f"{suite}.svg", text + program, draw)
    return drawn


def run(path: pathlib.Path) -> str:
    """The notebook with what its cells print. A cell that raises ends the build."""
    nbformat, nbclient = importlib.import_module("nbformat"), importlib.import_module("nbclient")
    text = path.read_text()

    def execute(to: pathlib.Path) -> None:
        notebook = nbformat.reads(text, as_version=4)
        # As tests do, with XLA's compiler for a GPU that is only described.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(sys.prefix) / "deviceless")}
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}})
        client.execute(env=environment)
        to.write_text(nbformat.writes(notebook))

    return _made_once(path.name, text + _library(), execute)


def _library() -> str:
    """A hash of what notebooks import of ours, and of the C++ behind it: what they print depends on it."""
    digest = hashlib.sha256()
    for folder in ("eqxcallback", "models", "csrc"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _made_once(name: str, source: str, make: Callable[[pathlib.Path], None]) -> str:
    """The text that `make` writes to a file, or has written for the same source. What it wrote for another is removed."""
    kept = KEPT / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}-{name}"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        # A build that is interrupted leaves no half of a file.
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            made = pathlib.Path(folder) / name
            make(made)
            made.replace(kept)
        for old in KEPT.glob(f"{'?' * 12}-{name}"):
            if old != kept:
                old.unlink()
    return kept.read_text()
