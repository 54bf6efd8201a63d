"""The page of HTML that an inspection is saved as. It needs no other file, and no script."""

from collections.abc import Iterator
from html import escape

from ._plots import color, is_in_roofline, left_out, roofline, timeline
from ._profile import Profile, cells, headline, title


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto;
  padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: 2px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--faint); }
.word { text-align: left; }
.swatch { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
pre { overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg line { stroke: var(--faint); }
.roof { stroke: var(--ink); stroke-width: 2; fill: none; }
"""
_WORDS = (0, 1, 9)  # columns that are not numbers


def page(name: str, calls: str, profile: Profile | None) -> str:
    """**Arguments:** `calls` is the table of calls as text."""
    body = [f"<h1>{escape(name)}</h1>"]
    if profile is not None:
        body += _of_profile(profile)
        body.append("<h2>External calls</h2>")
    body.append(f"<pre>{escape(calls)}</pre>")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(name)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _of_profile(profile: Profile) -> Iterator[str]:
    yield "".join(f"<p>{escape(line)}</p>" for line in headline(profile).splitlines())
    head, *rows = cells(profile)
    yield f"<table>\n<tr>{''.join(_cell('th', i, escape(text)) for i, text in enumerate(head))}</tr>"
    for number, row in enumerate(rows):
        texts = [escape(text) for text in row]
        if number < len(profile.rows):
            texts[0] = f'<span class="swatch" style="background: {color(number)}"></span>{texts[0]}'
        yield f"<tr>{''.join(_cell('td', i, text) for i, text in enumerate(texts))}</tr>"
    yield "</table>"
    yield "<h2>Timeline of one run</h2>"
    yield timeline(profile)
    if count := left_out(profile):
        yield f"<p>{count} shorter steps are not drawn.</p>"
    yield "<p>A lane for each thread that started steps of the program. A kernel may use more threads than the one it is in.</p>"
    yield "<h2>Roofline</h2>"
    yield roofline(profile)
    if names := dict.fromkeys(title(row) for row in profile.rows if not is_in_roofline(row)):
        yield f"<p>Not drawn, as they compute next to nothing, or nobody knows how much: {escape(', '.join(names))}.</p>"


def _cell(tag: str, column: int, content: str) -> str:
    return f'<{tag} class="word">{content}</{tag}>' if column in _WORDS else f"<{tag}>{content}</{tag}>"
