"""A report as a page of HTML."""

import html.parser

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.inspection import _html, _plots

from .layers import Scale


# Elements that HTML never closes.
VOID = ("meta",)


class Page(html.parser.HTMLParser):
    """The elements of a page, and its text. An element that is closed in another one is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.addresses = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def double(ctx, out, x):
    np.multiply(x, 2, out=np.asarray(out))


doubled = eqxc.Op('a<b>&"c', kernels={"cpu": eqxc.PythonKernel(double)}, reference=lambda x: 2 * x)


def program(x):
    return jax.vmap(Scale(jnp.ones(64)))(doubled(x @ x))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    report = eqxc.inspect(program, jnp.ones((64, 64)), profile=True, repeats=2)
    path = tmp_path_factory.mktemp("saved") / "report.html"
    report.save(path)
    return report, path.read_text(encoding="utf-8")


def test_a_page(saved):
    report, text = saved
    page = Page(text)
    assert page.tags.count("svg") == 2
    assert page.tags.count("rect") == len(report.profile.spans)
    assert page.tags.count("tr") == 1 + len(report.profile.rows) + 2
    assert page.tags.count("circle") == sum(bool(row.flops) for row in report.profile.rows)
    assert "program: 2 external calls, compiled for cpu" in page.text


def test_it_needs_no_other_file_and_no_script(saved):
    _, text = saved
    page = Page(text)
    assert page.addresses == []
    assert not {"script", "link", "img"} & set(page.tags)
    assert "url(" not in text
    assert len(text) < 20_000


def test_names_are_text(saved):
    _, text = saved
    assert "a<b>" not in text
    page = Page(text)
    assert 'a<b>&"c' in page.text
    assert "b" not in page.tags


def test_a_long_timeline_has_the_longest_steps(monkeypatch):
    monkeypatch.setattr(_plots, "_SPANS", 3)

    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: doubled(x), x)

    report = eqxc.inspect(loop, jnp.ones(3), profile=True, repeats=1)
    assert report.profile is not None
    page = Page(_html.page("loop", "", report.profile))
    assert page.tags.count("rect") == 3
    assert f"{len(report.profile.spans) - 3} shorter steps are not drawn." in page.text


def test_a_report_without_a_profile(tmp_path):
    path = tmp_path / "report.html"
    eqxc.inspect(program, jnp.ones((64, 64))).save(str(path))
    page = Page(path.read_text(encoding="utf-8"))
    assert "svg" not in page.tags
    assert "compiled for cpu" in page.text


@pytest.mark.parametrize("name", ["report.txt", "report", "html"])
def test_other_suffixes(name, tmp_path):
    report = eqxc.inspect(jnp.sin, jnp.ones(2))
    with pytest.raises(ValueError, match=r"Inspection.save: expected a path that ends in \.html; got '.*'"):
        report.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
