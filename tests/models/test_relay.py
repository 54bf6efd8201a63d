"""A connection to process 0 that stays open on this side when process 0 is gone."""

import contextlib
import queue
import socket
import threading

import pytest

from models._program import UsageError
from models.parallel import processes
from models.parallel.relay import Relay, wait_for

from ..devices.test_processes import free_port


@pytest.fixture
def target():
    """A listener in the place of process 0, with its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"localhost:{listener.getsockname()[1]}"


@contextlib.contextmanager
def connected(listener, relay):
    """The two ends of a connection through a relay: of JAX, and of process 0."""
    with socket.create_connection(("127.0.0.1", int(relay.address.split(":")[1])), timeout=10) as near:
        far, _ = listener.accept()
        with far:
            far.settimeout(10)
            yield near, far
            relay.end_watch()


def test_it_passes_on_what_both_sides_send(target):
    data = bytes(range(256)) * 4000
    with connected(target[0], Relay(target[1], pytest.fail)) as (near, far):
        for sender, receiver in ((near, far), (far, near)):
            sender.sendall(data)
            received = bytearray()
            while len(received) < len(data):
                received += receiver.recv(1 << 20)
            assert received == data


def test_the_other_side_goes_and_this_one_stays_open(target):
    lost, is_over = threading.Event(), threading.Event()

    def end():
        lost.set()
        is_over.wait(10)

    with connected(target[0], Relay(target[1], end)) as (near, far):
        far.close()
        assert lost.wait(10)
        for _ in range(3):
            near.sendall(b"are you there?")  # as JAX's heartbeats
        near.settimeout(0.2)
        with pytest.raises(TimeoutError):
            near.recv(1)
        is_over.set()


def test_the_other_side_listens_no_more(target):
    lost = threading.Event()
    relay = Relay(target[1], lost.set)
    target[0].close()
    with socket.create_connection(("127.0.0.1", int(relay.address.split(":")[1])), timeout=10):
        assert lost.wait(10)


def test_this_side_may_close(target):
    with connected(target[0], Relay(target[1], pytest.fail)) as (near, far):
        near.close()
        assert far.recv(1) == b""


def test_at_the_end_the_other_side_may_close_too(target):
    relay = Relay(target[1], pytest.fail)
    with connected(target[0], relay) as (near, far):
        relay.end_watch()
        far.close()
        assert near.recv(1) == b""


def test_nobody_listens():
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        wait_for(f"[::1]:{port}" if socket.has_ipv6 else f"localhost:{port}", 0.2)


def test_process_0_does_not_come(monkeypatch):
    monkeypatch.setattr(processes, "_START", 0.2)
    port = free_port()
    message = (
        rf"process 1 expected process 0 to listen at localhost:{port} after 0.2 seconds at most; got: .*refused\. Start"
    )
    with pytest.raises(UsageError, match=message), processes.joined(1, f"localhost:{port}", 2, 1):
        pass


def test_a_process_that_has_lost_process_0_ends(target, monkeypatch, capsys):
    codes = queue.Queue()
    monkeypatch.setattr(processes, "_LAST_WORDS", 0)
    monkeypatch.setattr(processes, "_exit", codes.put)
    relay = processes._reach(target[1], 1)
    target[0].accept()[0].close()  # which asked whether somebody listens
    with connected(target[0], relay) as (_, far):
        far.close()
        assert codes.get(timeout=10) == 2
    message = "process 1 ends, because process 0 is gone. See what it says, and start all of them again.\n"
    assert capsys.readouterr().err == message
