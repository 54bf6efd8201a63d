"""Settings in files of JSON."""

import json
import pathlib
from typing import Any

from ._errors import ModelFileError


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object of a file of JSON. Raises `ModelFileError`."""
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ModelFileError(f"{path}: expected an object of JSON; got {type(settings).__name__}.")
    return settings


def read_json(path: pathlib.Path) -> Any:
    """Whatever a file of JSON has. Raises `ModelFileError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: expected a file of JSON; got {error}.") from None
