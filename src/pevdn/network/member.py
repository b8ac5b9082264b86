"""A member as a process: reads its files, runs, and can be watched and stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pevdn._platform import refuse_miscompiling_jaxlib
from pevdn.network import roster_file, status
from pevdn.network.environment import Body
from pevdn.network.episodes import WORLD_TIMEOUT
from pevdn.network.party import Party
from pevdn.network.roster import WORLD
from pevdn.network.world_server import WorldServer
from pevdn.storage.files import lock, make_private
from pevdn.storage.signals import STOP

OnReport = Callable[[dict[str, Any]], None]  # gets a member's report every few seconds


def data_of(team: Path, me: str) -> Path:
    """Return the default directory of a member's data."""
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
    on_report: OnReport | None = None,
    world_timeout: float = WORLD_TIMEOUT,
) -> dict[str, Any]:
    """Take part in a team until it has finished; return the last report.

    `me` is a party of the roster, or "world". A party with its own `body` needs no world.
    `world_timeout` is the number of seconds that an external world may take for a step or a reset.
    """
    roster = roster_file.read(team)
    member = roster.member(me)
    if me != WORLD:
        refuse_miscompiling_jaxlib()
    private = roster_file.private_key(key or team.parent / f"{me}.key", member)
    folder = out or data_of(team, me)
    os.umask(0o077)  # no other user can read what it writes
    make_private(folder)
    with lock(folder):
        process: Party | WorldServer
        if me == WORLD:
            process = WorldServer(roster, private, folder, listen, world_timeout)
        else:
            process = Party(roster, me, private, folder, body, listen)
        if metrics_port is not None:
            status.serve(metrics_port, process.status)
        asyncio.run(_run(process, on_report))
        return process.status.report()


async def _run(process: Party | WorldServer, on_report: OnReport | None) -> None:
    loop = asyncio.get_running_loop()
    for number in STOP:
        loop.add_signal_handler(number, process.group.interrupt)
    reporting = asyncio.create_task(_report(process, on_report)) if on_report is not None else None
    try:
        await process.run()
    finally:
        if reporting is not None:
            reporting.cancel()


async def _report(process: Party | WorldServer, on_report: OnReport) -> None:
    while True:
        await asyncio.sleep(5.0)
        on_report(process.status.report())
