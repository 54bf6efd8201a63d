"""The models, the engine and uvicorn, put together."""

import argparse
import asyncio
import ctypes
import functools
import pathlib
import socket

import jax.numpy as jnp
import uvicorn

from .. import llama
from .._program import progress, report, rounding_of
from ..decoding.batch import Batch
from ..embedder import Embedder, default_folder
from ..model_files import open_files
from .app import make_app
from .embeddings import Embeddings
from .engine import Engine
from .language import Language
from .listening import cannot_listen


# A prompt is read in chunks of this many tokens at most, between which other answers go on.
_LONGEST_CHUNK = 128
_M_MMAP_THRESHOLD = -3  # of malloc.h
# So long who reads an answer may take for its end, when the server shuts down.
_SHUTDOWN_SECONDS = 5


class Server(uvicorn.Server):
    """Loads the models, and compiles what they run.

    **Arguments:**

    - `options`: of the program.
    """

    def __init__(self, options: argparse.Namespace):
        _give_memory_back()
        rounding = rounding_of(options)
        file, tokenizer = open_files(options.weights)
        embeddings = None if options.no_embeddings else _load_embeddings(options, jnp.dtype(rounding["dtype"]))
        shown = functools.partial(progress, desc="loading", unit="block")
        model = llama.load(file, **rounding, packed=True, progress=shown)
        batch = Batch(model, widths=_widths(options.rows), room=options.context, longest_chunk=_LONGEST_CHUNK)
        for compile_program in progress(batch.programs(), desc="compiling", unit="program"):
            compile_program()
        self._engine = Engine(batch, rows=options.rows, max_queue=options.max_queue, on_end=self._stop)
        file_name = "SmolLM2-135M-Instruct" if options.weights is None else name_of(options.weights)
        language = Language(options.name or file_name, self._engine, tokenizer, timeout=options.timeout)
        self._closing = asyncio.Event()
        app = make_app(language, embeddings, api_key=options.api_key, origins=options.cors, closing=self._closing)
        super().__init__(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )

    def serve_at(self, bound: socket.socket) -> None:
        """Serve until a signal comes.

        **Raises:** `UsageError` if another program has taken the address, and what ended the engine, if a mistake of ours did.
        """
        try:
            self.run([bound])
        finally:
            self._engine.close()
        if self._engine.error is not None:
            raise self._engine.error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        addresses = [listening.getsockname()[:2] for listening in sockets or []]
        try:
            await super().startup(sockets)
        except OSError as error:  # another program has listened at the address while the models were loaded
            host, port = addresses[0]
            raise cannot_listen(host, port, error) from None
        for listening, (host, port) in zip(sockets or [], addresses, strict=True):
            host = f"[{host}]" if listening.family == socket.AF_INET6 else host
            report(f"serving at http://{host}:{port}/v1; Ctrl-C ends it")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the requests first: uvicorn waits for those who read their answers."""
        self._closing.set()
        self._engine.stop()
        await super().shutdown(sockets)

    def _stop(self) -> None:
        self.should_exit = True


def _give_memory_back() -> None:
    """Let glibc give back the caches that are freed.

    By default it takes the next ones from its heap, where those of other sizes leave holes: after eight answers at once the
    process had 2.6 GB, and has 1.2 GB with this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library knows no such option
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _load_embeddings(options: argparse.Namespace, dtype: jnp.dtype) -> Embeddings:
    folder = default_folder() if options.embeddings is None else options.embeddings
    name = "all-MiniLM-L6-v2" if options.embeddings is None else name_of(folder)
    embedder = Embedder(folder, dtype=dtype, progress=progress)
    return Embeddings(name, embedder, max_queue=options.max_queue, timeout=options.timeout)


def name_of(path: pathlib.Path) -> str:
    """The name of a model: of its folder, whose dots belong to it, or of its file, without `.gguf`."""
    return path.resolve().name if path.is_dir() else path.stem


def _widths(rows: int) -> list[int]:
    """The powers of two below `rows`, and `rows`."""
    return [1 << i for i in range((rows - 1).bit_length())] + [rows]
