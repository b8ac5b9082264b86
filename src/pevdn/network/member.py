"""A member as a process: from files to a run that can be watched, stopped and gone on with."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pevdn._platform import refuse_miscompiling_jaxlib
from pevdn.network import roster as rosters
from pevdn.network import status
from pevdn.network.environment import Body
from pevdn.network.party import Party
from pevdn.network.roster import WORLD
from pevdn.network.world_server import WorldServer
from pevdn.storage.files import lock, make_private

Told = Callable[[dict[str, Any]], None]  # what is shown of a member every few seconds


def data_of(team: Path, me: str) -> Path:
    """Where a member keeps its data unless it is told."""
    return team.parent / f"{me}.data"


def run_member(
    team: Path,
    me: str,
    *,
    out: Path | None = None,
    key: Path | None = None,
    listen: str | None = None,
    metrics_port: int | None = None,
    body: Body | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """Take part in a team until it is done; returns the last report.

    `me` is a party of the roster, or "world". A party with a `body` of its own needs no world.
    """
    roster = rosters.read(team)
    member = roster.member(me)
    if me != WORLD:
        refuse_miscompiling_jaxlib()
    secret = rosters.private_key(key or team.parent / f"{me}.key", member)
    folder = out or data_of(team, me)
    os.umask(0o077)  # what it keeps is nobody else's business
    make_private(folder)
    with lock(folder):
        process: Party | WorldServer
        if me == WORLD:
            process = WorldServer(roster, secret, folder, listen)
        else:
            process = Party(roster, me, secret, folder, body, listen)
        if metrics_port is not None:
            status.serve(metrics_port, process.status)
        asyncio.run(_watched(process, told))
        return process.status.report()


async def _watched(process: Party | WorldServer, told: Told | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, process.group.interrupt)
    watching = asyncio.create_task(_tell(process, told)) if told is not None else None
    try:
        await process.run()
    finally:
        if watching is not None:
            watching.cancel()


async def _tell(process: Party | WorldServer, told: Told) -> None:
    while True:
        await asyncio.sleep(5.0)
        told(process.status.report())
