"""Small teams over real TLS for the tests of pevdn.network.

Parties and world run in one event loop, each with its own folder, key and sockets. A kill is an
exception that no code of a member catches.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import socket
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pevdn.agent.packed_replay import PackedReplay
from pevdn.config import experiment as configuration
from pevdn.errors import PevdnError
from pevdn.network import keys, roster_file
from pevdn.network import wire_pb2 as wire
from pevdn.network.party import Party
from pevdn.network.roster import Roster
from pevdn.network.world_server import WorldServer
from pevdn.worlds.toy import Coordination

SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "buffer_size": 16,
    "expected_batch_size": 6,
    "parallel_episodes": 2,
    "update_every": 1,
    "eval_episodes": 4,
    "eval_every": 100,
    "average_decay": 0.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "iql": SMALL,
    "pe-vdn-a": SMALL,
    "pe-vdn-b": SMALL,
    "pe-vdn-c": {
        **SMALL,
        "network": "recurrent",
        "return_lambda": 0.0,
        "noise_multiplier": 1.0,
        "anchor": False,
    },
    "pe-vdn-d": {
        **SMALL,
        "network": "recurrent",
        "return_lambda": 0.0,
        "openings": 2,
    },
}
NAMES = ("alice", "bob", "carol")


class Killed(BaseException):
    """The process is gone: nothing of a party or a world catches this."""


class Three(Coordination):
    """The coordination game with three agents alike, who share one program."""

    def __init__(self) -> None:
        super().__init__(3)
        self.cue_counts = (2, 2, 2)
        self.agents = (self.agents[0],) * 3


def make_team(
    out: Path,
    algorithm: str = "pe-vdn-b",
    mode: str = "shares",
    *,
    env: str = "toy:two-step",
    parties: int = 2,
    steps: int = 160,
    patience: float = 60.0,
    rehearsal: bool = True,
    **changes: Any,
) -> Roster:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(parties + 1)]
    *ports, last = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    config = configuration.make(algorithm, env, steps, 1, 0, {**SETTINGS[algorithm], **changes})
    places = [(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, ports, strict=False)]
    return keys.create(out, config, places, f"127.0.0.1:{last}", mode, patience, rehearsal)


def party_of(team: Roster, name: str, body: Any = None) -> Party:
    folder = team.path.parent
    key = roster_file.private_key(folder / f"{name}.key", team.member(name))
    return Party(team, name, key, folder / f"{name}.data", body)


def world_of(team: Roster) -> WorldServer:
    folder = team.path.parent
    assert team.world is not None
    key = roster_file.private_key(folder / "world.key", team.world)
    return WorldServer(team, key, folder / "world.data")


def members_of(team: Roster) -> dict[str, Any]:
    members: dict[str, Any] = {party.name: party_of(team, party.name) for party in team.parties}
    return {**members, "world": world_of(team)}


def play(members: dict[str, Any], timeout: float = 120.0) -> dict[str, str]:
    """Run all to the end; what those who stopped said."""
    return asyncio.run(asyncio.wait_for(_run_all(members), timeout))


def play_until_killed(members: dict[str, Any]) -> None:
    """Run all until one of them is killed, and stop the others then."""

    async def together() -> None:
        tasks = [asyncio.ensure_future(member.run()) for member in members.values()]
        done, left = await asyncio.wait(tasks, timeout=120, return_when=asyncio.FIRST_EXCEPTION)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert any(isinstance(task.exception(), Killed) for task in done)

    asyncio.run(together())


def play_all(teams: list[dict[str, Any]], timeout: float) -> list[dict[str, str]]:
    """Several teams at the same time, where most of the time is waiting."""

    async def together() -> list[dict[str, str]]:
        return await asyncio.wait_for(asyncio.gather(*map(_run_all, teams)), timeout)

    return asyncio.run(together())


async def _run_all(members: dict[str, Any]) -> dict[str, str]:
    ended = await asyncio.gather(*(m.run() for m in members.values()), return_exceptions=True)
    wrong = [e for e in ended if e is not None and not isinstance(e, PevdnError)]
    if wrong:
        raise wrong[0]
    return {name: str(e) for name, e in zip(members, ended, strict=True) if e is not None}


def assert_one_sentence(text: str) -> None:
    assert "\n" not in text and text.endswith(".") and "Traceback" not in text, text


def params_of(member: Party) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(member.state.learner.params)]


def assert_same(a: Party, b: Party) -> None:
    """To the last bit."""
    assert a.state.progress == b.state.progress
    for x, y in zip(
        jax.tree.leaves(a.state.learner), jax.tree.leaves(b.state.learner), strict=True
    ):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def assert_near(simulation: Any, state: Any, members: list[Party]) -> None:
    """Whether all parties have the parameters of their agents in a simulation, to 4 digits."""
    for kind, learner in zip(simulation.team.kinds, state.learners, strict=True):
        for n, index in enumerate(kind.members):
            wanted = jax.tree.leaves(jax.tree.map(lambda x, n=n: x[0, n], learner.params))
            for mine, theirs in zip(
                params_of(members[index]), map(np.asarray, wanted), strict=True
            ):
                assert np.abs(mine - theirs).max() <= 1e-4 * np.abs(theirs).max()


def events(member: Party) -> list[str]:
    lines = (member.folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


@dataclasses.dataclass
class Heard:
    """A training to its end, and everything that was said and thought in it."""

    team: Roster
    members: dict[str, Party]
    said: list[tuple[str, str, bytes]]  # from, to, what
    words: dict[int, dict[str, np.ndarray]]  # of an update: who had which encoded messages
    opened: dict[int, dict[str, np.ndarray]]  # and which sum it opened
    observed: dict[str, set[bytes]]


def listen(members: dict[str, Any], team: Roster) -> Heard:
    heard = Heard(team, {}, [], defaultdict(dict), defaultdict(dict), defaultdict(set))
    for name, member in members.items():
        transport = member.group.transport
        transport.tap = lambda to, data, name=name: heard.said.append((name, to, data))
        if isinstance(member, Party):
            heard.members[name] = member
            _spy_on(heard, name, member)
    return heard


def _spy_on(heard: Heard, name: str, member: Party) -> None:
    open_sum, agent = member.protocol.open_sum, member.player.agent

    async def spied_sum(step: int, words: np.ndarray) -> np.ndarray:
        heard.words[step][name] = words.copy()
        total = await open_sum(step, words)
        heard.opened[step][name] = total.copy()
        return total

    class SpiedAgent:
        def __getattr__(self, what: str) -> Any:
            return getattr(agent, what)

        def act(self, params: Any, memory: Any, seen: np.ndarray, *rest: Any) -> Any:
            heard.observed[name] |= {row.tobytes() for row in seen.astype("<f4")}
            return agent.act(params, memory, seen, *rest)

    member.protocol.open_sum = spied_sum  # type: ignore[method-assign]
    member.player.agent = SpiedAgent()  # type: ignore[assignment]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def is_exactly(message: Any, data: bytes) -> bool:
    """Whether the bytes are this message and nothing more."""
    try:
        message.ParseFromString(data)
    except Exception:
        return False
    size = message.ByteSize()
    message.DiscardUnknownFields()
    return size == message.ByteSize() == len(data)


def lie(member: Any, change: Callable[[str, wire.Envelope], wire.Envelope | bytes | None]) -> None:
    """Let a member send something else than it means to; None: what it means."""
    transport = member.group.transport
    send, attempt = transport.send, transport._attempt

    async def changed(to: str, envelope: wire.Envelope, *, until: float | None) -> Any:
        other = wire.Envelope.FromString(envelope.SerializeToString())
        instead = change(to, other)
        if isinstance(instead, bytes):
            return await attempt(to, instead, 5.0)
        return await send(to, other if instead is None else instead, until=until)

    transport.send = changed


async def lives(make: Callable[[], Any], fate: Any, after: Callable[[Any], None]) -> Any:
    """A member that is started again whenever it is killed."""
    while True:
        member = make()
        fate.of(member)
        try:
            await member.run()
            return member
        except Killed:
            after(member)


def play_on(
    team: Roster, fates: dict[str, Any], after: Callable[[Any], None] = lambda _: None
) -> dict[str, Any]:
    """Train to the end with members that die."""

    def make(name: str) -> Any:
        return world_of(team) if name == "world" else party_of(team, name)

    async def together() -> list[Any]:
        work = [lives(lambda n=name: make(n), fates[name], after) for name in team.names]
        return await asyncio.wait_for(asyncio.gather(*work), 200)

    return dict(zip(team.names, asyncio.run(together()), strict=True))


class Safe:
    def of(self, member: Any) -> None: ...


def twins(out: Path, *args: Any, **options: Any) -> tuple[Roster, Roster]:
    """The same team twice, in two directories: same keys, same secrets, same addresses."""
    team = make_team(out / "one", *args, **options)
    members_of(team)  # makes the secrets
    for path in (out / "one").glob("*.data/*"):
        if path.name != "secret":
            path.unlink()
    shutil.copytree(out / "one", out / "two")
    return team, roster_file.read(out / "two" / "team.toml")


def packed_episodes(*lengths: int) -> PackedReplay:
    """Episodes of these lengths, with made-up content."""
    episodes = PackedReplay(len(lengths))
    episodes.length[:-1] = lengths
    episodes.rows = [bytes([n]) * n for n in lengths] + [b""]
    return episodes
