"""The routes of the server."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import replies
from .embeddings import Embeddings
from .errors import ApiError, json_response
from .fields import shown
from .language import Language
from .requests import parse_chat, parse_completion, parse_embeddings
from .waiting import unless_set


MAX_BODY = 4 << 20  # bytes
_BODY_TIMEOUT = 30.0  # seconds

_Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(
    language: Language,
    embeddings: Embeddings | None = None,
    *,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    closing: asyncio.Event | None = None,
) -> Starlette:
    """The server as an application of ASGI.

    **Arguments:**

    - `language`: which answers.
    - `embeddings`: which embeds, or `None`.
    - `api_key`: which clients have to send, or `None`.
    - `origins`: of pages that a browser lets ask, as `"https://example.org"`, or `"*"` for all.
    - `closing`: set when the server shuts down: bodies, tokens and embeddings are waited for no more. The engine ends the
        answers. `None` if others see to that.
    """
    created = int(time.time())
    names = [model.name for model in (language, embeddings) if model is not None]

    async def chat(http: Request) -> Response:
        asked = parse_chat(await unless_set(closing, _body(http)))
        _check_model(asked.model, language.name)
        return await language.answer(http, asked, is_chat=True, closing=closing)

    async def complete(http: Request) -> Response:
        asked = parse_completion(await unless_set(closing, _body(http)))
        _check_model(asked.model, language.name)
        return await language.answer(http, asked, is_chat=False, closing=closing)

    async def embed(http: Request) -> Response:
        asked = parse_embeddings(await unless_set(closing, _body(http)))
        _check_model(asked.model, None if embeddings is None else embeddings.name)
        assert embeddings is not None
        return await unless_set(closing, embeddings.embed(http, asked))

    async def models(http: Request) -> Response:
        return json_response(replies.models(names, created))

    async def model(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in names:
            raise _no_model(name, *names)
        return json_response(replies.model(name, created))

    async def health(http: Request) -> Response:
        return json_response({"status": "ok", "requests": language.engine.num_requests})

    def guarded(endpoint: _Endpoint) -> _Endpoint:
        async def checked(http: Request) -> Response:
            if api_key is not None:
                _check_key(http, api_key)
            return await endpoint(http)

        return checked

    # Any header may come: the package of OpenAI for pages sends some of its own.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    return Starlette(
        middleware=[cors] if origins else [],
        routes=[
            Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
            Route("/v1/completions", guarded(complete), methods=["POST"]),
            Route("/v1/embeddings", guarded(embed), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/health", health),
        ],
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: _nobody_waits,
            Exception: _fail,
        },
    )


async def _body(http: Request) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            async for part in http.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise ApiError(f"body: expected at most {MAX_BODY} bytes; got more. Shorten it.", status=413)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            f"body: expected all of it in {_BODY_TIMEOUT:g} seconds; got {size} bytes.", status=408
        ) from None
    return b"".join(parts)


def _check_key(http: Request, api_key: str) -> None:
    kind, _, key = http.headers.get("authorization", "").partition(" ")
    # In a time that says nothing of how much of the key is right.
    is_right = hmac.compare_digest(key.strip().encode("utf-8", "replace"), api_key.encode("utf-8", "replace"))
    if kind.lower() != "bearer" or not is_right:
        message = "authorization: expected the header `Authorization: Bearer KEY` with the server's key; got another, or none."
        raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _check_model(name: str, expected: str | None) -> None:
    if name != expected:
        raise _no_model(name, *([] if expected is None else [expected]))


def _no_model(name: str, *names: str) -> ApiError:
    expected = " or ".join(map(shown, names)) or "none, as this server has no model for it"
    message = f"model: expected {expected}; got {shown(name)}."
    return ApiError(message, status=404, param="model", code="model_not_found")


async def _refuse(http: Request, error: Any) -> Response:
    return error.response()


async def _refuse_http(http: Request, error: Any) -> Response:
    """Put what Starlette refuses, routes and methods that are not there, into OpenAI's form."""
    expected = {404: "a path of this server", 405: f"a method of {error.headers and error.headers.get('Allow')}"}
    message = f"{http.method} {http.url.path}: expected {expected.get(error.status_code, error.detail)}."
    return ApiError(message, status=error.status_code, headers=error.headers).response()


async def _nobody_waits(http: Request, error: Any) -> Response:
    return Response(status_code=499)  # as others log it; nobody reads it


async def _fail(http: Request, error: Any) -> Response:
    return ApiError("the server: this is a mistake of its own, which its log has.", status=500).response()
