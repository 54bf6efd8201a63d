"""Errors as OpenAI's clients know them."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """An answer to a request that cannot be met.

    **Arguments:**

    - `message`: who, what was expected, what came, and the remedy.
    - `status`: of HTTP.
    - `param`: the field of the request that is wrong.
    - `code`: by which programs know the error.
    - `headers`: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def overloaded(message: str) -> ApiError:
    """Return the error of who may try again in a moment, which clients do by themselves."""
    return ApiError(message, status=503, code="overloaded", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return ApiError("the server is shutting down: the answer has no end.", status=503, code="shutting_down")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` in ASCII: it may quote halves of characters, which JSON has and UTF-8 has not."""
    return Response(json.dumps(content), status, headers, "application/json")
