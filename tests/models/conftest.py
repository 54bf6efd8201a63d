"""The language model, and programs that are started."""

import contextlib
import resource
import signal
import warnings

import pytest

from models import gguf, llama
from models.tokens.tokenizer import Tokenizer


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")


@pytest.fixture(scope="session", autouse=True)
def programs_of_the_tests(tmp_path_factory):
    """Programs that the tests start keep what they compile for each other, not for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def file():
    """The language model's file."""
    return gguf.open_model(gguf.default_path())


@pytest.fixture(scope="session")
def tokenizer(file):
    return Tokenizer(file.metadata)


@pytest.fixture(scope="session")
def model(file):
    return llama.load(file)


@pytest.fixture
def full_disk():
    """Return a context in which files can have so many bytes: a write beyond fails, as on a full disk."""

    @contextlib.contextmanager
    def limited(most=1000):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with warnings.catch_warnings():
                # The cache of programs is that of the tests, and has the limit too.
                warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
                yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def interruptible():
    """Programs that are started here can be interrupted. A shell starts what it runs in the background with SIGINT ignored, and
    a process hands that on to its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
