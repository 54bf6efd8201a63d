"""The openings of docstrings: a verb or the thing itself, as CONTRIBUTING.md asks for under Words."""

import ast
import pathlib

import pytest


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("eqxcallback", "models", "benchmarks", "scripts", "tests")
# A reader who begins with one of these has to guess the noun that it stands for.
BAD_OPENINGS = {"Of", "Those", "Which", "Where", "What", "Whether", "That", "How"}


def is_python(path):
    """True for modules, their stubs, and scripts whose first line names Python."""
    return path.suffix in (".py", ".pyi") or (
        path.parent.name == "scripts" and b"python" in path.read_bytes().partition(b"\n")[0]
    )


def docstrings(source):
    """Yield `(name, line, text)` for each docstring: of modules, classes and functions, and of the attributes of classes."""
    pending = [(ast.parse(source), "module")]
    while pending:
        node, name = pending.pop()
        for child in ast.iter_child_nodes(node):
            pending.append((child, getattr(child, "name", name)))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield name, node.lineno, node.value.value


def bad_openings(source):
    """Return `(line, name, first word)` for each docstring that begins badly."""
    words = [(name, line, text.split()[:1]) for name, line, text in docstrings(source)]
    words = [(name, line, first[0].strip("`*,.:;?!")) for name, line, first in words if first]
    return sorted((line, name, word) for name, line, word in words if word in BAD_OPENINGS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_the_thing_itself(folder):
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and is_python(path)]
    assert paths
    problems = [
        f"{path.relative_to(ROOT)}:{line}: the docstring of {name} begins with {word!r}"
        for path in paths
        for line, name, word in bad_openings(path.read_text())
    ]
    assert not problems, "\n".join(["begin with a verb or the thing itself:", *problems])


def test_bad_openings_are_seen_wherever_they_are():
    source = (
        '"""Where modules begin."""\n'
        "class Thing:\n"
        '    """The thing itself."""\n'
        "    size: int\n"
        '    r"""Of an attribute."""\n'
        "    async def method(self):\n"
        '        """\n'
        "        **Whether**, on the second line.\n"
        '        """\n'
        "        def inner():\n"
        '            """Which: with a colon."""\n'
        "def fine():\n"
        '    """Offer a word that begins like one of the list."""\n'
    )
    expected = [(1, "module", "Where"), (5, "Thing", "Of"), (7, "method", "Whether"), (11, "inner", "Which")]
    assert bad_openings(source) == expected
