"""The fields of a request, each taken once and checked."""

import json
from collections.abc import Collection
from typing import Any

from .errors import ApiError


class Fields:
    """The object that is the body of a request.

    A field that is null is as one that is not there. Every method raises `ApiError` for a value that is not as expected.
    """

    def __init__(self, body: bytes):
        try:
            value = json.loads(body, parse_constant=_refuse_constant)
        except (
            ValueError,
            RecursionError,
        ) as error:  # a ValueError: bytes that are no UTF-8, and numbers too long for an int
            raise ApiError(f"body: expected JSON; got {_one_line(error)}") from None
        if not isinstance(value, dict):
            raise ApiError(f"body: expected an object; got {shown(value)}.")
        self._rest: dict[str, Any] = {name: field for name, field in value.items() if field is not None}

    def any(self, name: str) -> Any:
        """Take a field of any type, or `None`."""
        return self._rest.pop(name, None)

    def required(self, name: str) -> Any:
        if name not in self._rest:
            raise ApiError(f"{name}: expected it in the request; got none.", param=name)
        return self._rest.pop(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._rest.pop(name, default)
        return value if value is None else text(name, value)

    def flag(self, name: str) -> bool:
        value = self._rest.pop(name, False)
        if not isinstance(value, bool):
            raise ApiError(f"{name}: expected true or false; got {shown(value)}.", param=name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._rest.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ApiError(f"{name}: expected a number from {low:g} to {high:g}; got {shown(value)}.", param=name)
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self._rest.pop(name, default)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise ApiError(f"{name}: expected an integer from {low} to {high}; got {shown(value)}.", param=name)
        return value

    def only(self, name: str, *values: Any) -> None:
        """Take a field that changes nothing with one of these values; no other value is supported."""
        value = self._rest.pop(name, values[0])
        # `True == 1` in Python.
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
            allowed = " or ".join(map(shown, values))
            message = f"{name}: expected {allowed}, all that is supported; got {shown(value)}. Leave it out."
            raise ApiError(message, param=name, code="unsupported_parameter")

    def ignore(self, names: Collection[str]) -> None:
        """Take fields that never change an answer."""
        for name in names:
            self._rest.pop(name, None)

    def end(self) -> None:
        """Refuse the fields that nobody has taken."""
        for name in self._rest:
            message = f"{shown(name)}: expected no field of this name, which is not supported. Leave it out."
            raise ApiError(message, param=name, code="unknown_parameter")


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ApiError(f"{name}: expected a string; got {shown(value)}.", param=name)
    return value


def shown(value: Any) -> str:
    """The beginning of a value, as an error quotes it."""
    try:
        whole = json.dumps(value)
    except RecursionError:
        whole = "what is nested too deep"
    return whole if len(whole) <= 80 else f"{whole[:77]}..."


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name}, which JSON does not have")


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:120]}."
