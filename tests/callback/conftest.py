"""A caller of handlers as XLA calls them on a GPU, and a count of compilations."""

import ctypes
import pathlib
import subprocess

import jax
import pytest


@pytest.fixture(scope="session")
def fake_xla(tmp_path_factory):
    library = tmp_path_factory.mktemp("fake_xla") / "fake_xla.so"
    source = pathlib.Path(__file__).parents[1] / "csrc" / "fake_xla.cc"
    include = f"-I{jax.ffi.include_dir()}"
    # The frame is laid out by the headers of the jaxlib that runs, as XLA would.
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", include, str(source), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


@pytest.fixture
def compilations():
    """A list that grows with each program that XLA compiles."""
    events = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
