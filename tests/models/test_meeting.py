"""The processes of a program that meet before JAX connects them: all come, or each says in one line why not."""

import concurrent.futures
import contextlib
import queue
import socket

import pytest

from models._program import UsageError
from models.parallel.meeting import listen, meet_others, meet_process_0
from models.parallel.watch import Watch


@contextlib.contextmanager
def meeting(processes, *others, seconds=10.0):
    """Process 0 and others, each of which is a process and the number of processes that it is told, in threads: their futures.
    The port comes with them."""
    listener = listen(0)
    port = listener.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        of_others = [
            pool.submit(meet_process_0, f"localhost:{port}", process, told, seconds) for process, told in others
        ]
        yield port, pool.submit(meet_others, listener, processes, seconds), of_others


def test_all_come_and_the_port_is_free_then():
    with meeting(3, (2, 3), (1, 3)) as (port, first, others):
        ends, theirs = first.result(), [other.result() for other in others]
        listen(port).close()  # as JAX's service does, while the connections are open
    lost = queue.Queue()
    watch = Watch(ends, 30, lambda *what: lost.put(what))
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.2)
    theirs[0].close()
    assert lost.get(timeout=10) == (2, "is gone")
    watch.end_watch()
    theirs[1].close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.2)


def test_the_silent_one_is_lost():
    lost = queue.Queue()
    with meeting(3, (2, 3), (1, 3)) as (_, first, others):
        ends, (of_2, of_1) = first.result(), [other.result() for other in others]
    watches = [Watch(which, 1.0, lambda *what: lost.put(what)) for which in (ends, {0: of_2})]
    with of_1:  # nobody sends there
        assert lost.get(timeout=10) == (1, "was silent for 1.0 seconds")
        with pytest.raises(queue.Empty):
            lost.get(timeout=2.0)  # while 0 and 2 hear each other
    for watch in watches:
        watch.end_watch()
    ends[2].shutdown(socket.SHUT_RDWR)


def assert_refused(first, others, reason):
    with pytest.raises(UsageError, match=f"^process 0 {reason}. Start all of them again.$"):
        first.result()
    for other in others:
        with pytest.raises(
            UsageError, match=f"process [12] expected process 0 to say that all have come; got: {reason}. St"
        ):
            other.result()


def test_one_does_not_come():
    with meeting(3, (1, 3), seconds=2.0) as (_, first, others):
        assert_refused(first, others, "expected 3 processes after 2.0 seconds at most; got: process 2 did not come")
    with meeting(4, seconds=0.1) as (_, first, others):
        assert_refused(first, others, ".*; got: process 1 and 2 and 3 did not come")


@pytest.mark.parametrize(("others", "got"), [([(1, 3), (1, 3)], "process 1 of 3 again"), ([(1, 4)], "process 1 of 4")])
def test_processes_that_are_not_of_the_program(others, got):
    with meeting(3, *others) as (_, first, others):
        assert_refused(first, others, f"expected each of 3 processes once; got: {got}")


def test_one_ends_before_all_have_come():
    reason = "expected 4 processes that run until all have come; got: process 1 ended"
    with meeting(4) as (port, first, _), socket.create_connection(("localhost", port)) as other:
        other.sendall(b"process 2 of 4 processes of models.parallel".ljust(64))  # which comes first
        with socket.create_connection(("localhost", port)) as end:
            end.sendall(b"process 1 of 4 processes of models.parallel".ljust(64))
        assert_refused(first, [], reason)
        with other.makefile() as lines:
            assert lines.readline() == f"{reason}\n"


def test_a_stranger_changes_nothing():
    with meeting(2) as (port, first, _):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
            assert stranger.recv(1) == b""
        with meet_process_0(f"localhost:{port}", 1, 2, 10.0):
            first.result()[1].close()


def test_process_0_ends_before_all_have_come():
    with socket.create_server(("localhost", 0)) as listener, concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(meet_process_0, f"localhost:{listener.getsockname()[1]}", 1, 2, 10.0)
        end, _ = listener.accept()
        with end:
            assert end.recv(64, socket.MSG_WAITALL).startswith(b"process 1 of 2 ")
        with pytest.raises(
            UsageError, match=r"process 1 expected process 0 to say .*; got: the connection's end\. Start all"
        ):
            other.result()
