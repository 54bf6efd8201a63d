"""The address at which the server listens."""

import contextlib
import socket

from .._program import UsageError


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: until the models are there, clients are refused. Raises `UsageError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
    except (OSError, UnicodeError) as error:
        raise cannot_listen(host, port, error) from None
    return bound


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(f"expected to listen at {host}, port {port}; got: {reason}")
