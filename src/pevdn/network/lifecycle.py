"""What parties and the world server share: connect, report, and leave with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pevdn.errors import PevdnError
from pevdn.network.group import Group
from pevdn.network.membership import Left
from pevdn.network.status import Status

FAREWELL = 5.0  # seconds to tell the others why a member stops


@asynccontextmanager
async def connected(group: Group, status: Status) -> AsyncIterator[None]:
    """Connect and write the status every second; after an error, tell all members the reason."""
    await group.start()
    heartbeat = asyncio.create_task(_write_status(status))
    try:
        yield
    except Exception as problem:
        status.state = "stopped"
        status.event("stopped", reason=str(problem) or type(problem).__name__)
        if isinstance(problem, PevdnError) and not isinstance(problem, Left):
            await group.say_farewell(str(problem), FAREWELL)
        raise
    finally:
        heartbeat.cancel()
        status.write()
        await group.stop()


async def _write_status(status: Status) -> None:
    while True:
        status.write()
        await asyncio.sleep(1.0)
