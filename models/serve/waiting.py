"""Work that nobody waits for once the server shuts down."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from .errors import shutting_down


_T = TypeVar("_T")


async def unless_set(closing: asyncio.Event | None, work: Awaitable[_T]) -> _T:
    """Wait for some work. It is cancelled, with an `ApiError`, when the event is set."""
    if closing is None:
        return await work
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise shutting_down()
        return working.result()
    finally:
        working.cancel()
        ending.cancel()
