"""A language model and an embedder on a CPU, over HTTP as OpenAI's clients speak it: `python -m models.serve`.

The models are SmolLM2-135M-Instruct and all-MiniLM-L6-v2, or others of their families. What the server does goes to stderr.
"""

import argparse
import math
import pathlib
import re
import signal
import sys

from .._program import Parser, UsageError, add_rounding, add_weights, run
from ..compilation_cache import keep_programs
from .listening import bind


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m models.serve", description="Serve models over HTTP, as OpenAI's clients speak it.")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="refuse clients that do not send this key")
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin ask, such as http://localhost:3000, or of all (*); may be repeated",
    )
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
    model.add_argument("--name", help="of the language model, as clients ask for it (default: of its file or folder)")
    add_rounding(model)
    model.add_argument(
        "--embeddings", type=pathlib.Path, metavar="FOLDER", help="an embedder's folder (default: all-MiniLM-L6-v2)"
    )
    model.add_argument("--no-embeddings", action="store_true", help="serve the language model alone")
    options = parser.parse_args(arguments)
    key = options.api_key
    fits_header = re.compile("[!-~]+").fullmatch
    is_origin = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+").fullmatch
    not_origins = [origin for origin in options.cors if not is_origin(origin)]
    rules = [
        (0 <= options.port < 2**16, "--port from 0 to 65535", options.port),
        (key is None or fits_header(key), "--api-key of ASCII letters, digits and signs", repr(key)),
        (not not_origins, "--cors of SCHEME://HOST:PORT or *", ", ".join(map(repr, not_origins))),
        (options.name is None or options.name.strip(), "--name of one character or more", repr(options.name)),
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


def _serve(arguments: list[str] | None) -> None:
    options = _parse(arguments)
    try:
        from .server import Server
    except ModuleNotFoundError as error:
        raise UsageError(f"expected the extra serve; got no {error.name}. Run `pip install '.[serve]'`.") from None
    with bind(options.host, options.port) as bound:
        server = Server(options)
        signal.signal(signal.SIGTERM, lambda *_: None)  # the server handles it, and raises it again when all is done
        server.serve_at(bound)


def main(arguments: list[str] | None = None) -> int:
    return run("serve", _serve, arguments, remedy="Lower --context or --rows.")


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
