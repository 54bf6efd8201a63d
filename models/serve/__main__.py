"""A language model and an embedder on a CPU, over HTTP as OpenAI's clients speak it: `python -m models.serve`.

The models are SmolLM2-135M-Instruct and all-MiniLM-L6-v2, or others of their families. What the server does goes to stderr.
"""

import argparse
import contextlib
import math
import pathlib
import re
import signal
import socket
import sys

from .._program import Parser, UsageError, add_rounding, add_weights, run
from ..compilation_cache import keep_programs


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m models.serve", description="Serve models over HTTP, as OpenAI's clients speak it.")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="refuse clients that do not send this key")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--rows", type=int, default=8, metavar="N", help="answers that are made at a time (default: %(default)s)"
    )
    limits.add_argument(
        "--context",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="room for a prompt and its answer (default: %(default)s)",
    )
    limits.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="requests that may wait (default: %(default)s)"
    )
    limits.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for an answer (default: %(default)g)"
    )
    model = parser.add_argument_group("models")
    add_weights(model)
    add_rounding(model)
    model.add_argument(
        "--embeddings", type=pathlib.Path, metavar="FOLDER", help="an embedder's folder (default: all-MiniLM-L6-v2)"
    )
    model.add_argument("--no-embeddings", action="store_true", help="serve the language model alone")
    options = parser.parse_args(arguments)
    key = options.api_key
    fits_header = re.compile("[!-~]+").fullmatch
    rules = [
        (0 <= options.port < 2**16, "--port from 0 to 65535", options.port),
        (key is None or fits_header(key), "--api-key of ASCII letters, digits and signs", repr(key)),
        (options.rows >= 1, "--rows of 1 or more", options.rows),
        (options.context >= 1, "--context of 1 or more", options.context),
        (options.max_queue >= 0, "--max-queue of 0 or more", options.max_queue),
        (0 < options.timeout < math.inf, "--timeout above 0", options.timeout),
        (not options.no_embeddings or options.embeddings is None, "--embeddings or --no-embeddings", "both"),
    ]
    for holds, expected, got in rules:
        if not holds:
            parser.error(f"expected {expected}; got {got}")
    return options


def _bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: until the models are there, clients are refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"expected to listen at {host}, port {port}; got: {reason}") from None
    return bound


def _serve(arguments: list[str] | None) -> None:
    options = _parse(arguments)
    try:
        from .server import Server
    except ModuleNotFoundError as error:
        raise UsageError(f"expected the extra serve; got no {error.name}. Run `pip install '.[serve]'`.") from None
    with _bind(options.host, options.port) as bound:
        server = Server(options)
        signal.signal(signal.SIGTERM, lambda *_: None)  # the server handles it, and raises it again when all is done
        server.serve_at(bound)


def main(arguments: list[str] | None = None) -> int:
    return run("serve", _serve, arguments, remedy="Lower --context or --rows.")


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
