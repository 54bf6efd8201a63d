"""JSON in few lines, which a difference between two versions still shows."""

import json
from typing import Any


_WIDTH = 130


def dumps(data: Any) -> str:
    """JSON with numbers of six digits, and as many items on a line as it has room for."""
    return _text(data, 0)


def _text(value: Any, indent: int) -> str:
    if isinstance(value, float):
        value = float(f"{value:.6g}")
    if not isinstance(value, dict | list | tuple) or not value:
        return json.dumps(value)
    if isinstance(value, dict):
        items = [f"{json.dumps(str(key))}: {_text(item, indent + 1)}" for key, item in value.items()]
    else:
        items = [_text(item, indent + 1) for item in value]
    lines: list[str] = []
    for item in items:
        is_short = lines and "\n" not in lines[-1] + item and len(lines[-1]) + len(item) < _WIDTH - indent - 5
        if is_short:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + (",\n" + " " * (indent + 1)).join(lines) + end
