"""A team over real TLS: it learns what the simulation learns, tells nothing else, and stands kills.

Parties and world run in one loop here, each with its own folder, key and sockets; the slow tests
run them as processes. A kill in the loop is an exception that no code of the party catches.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import Said, start

import pevdn
from pevdn import worlds
from pevdn.config import experiment as configuration
from pevdn.config.experiment import fingerprint
from pevdn.errors import PevdnError, UsageError
from pevdn.privacy.accounting import Spent
from pevdn.privacy.ledger import Ledger
from pevdn.simulation.program import Simulation
from pevdn.worlds.toy import Coordination

pytest.importorskip("pevdn.network.transport", reason="the extra is not installed")

from pevdn.network import group as councils
from pevdn.network import keys, local, roster
from pevdn.network import party as parties
from pevdn.network import recovery as journals
from pevdn.network import secure_sum as sums
from pevdn.network import wire_pb2 as wire
from pevdn.network.party import Party
from pevdn.network.roster import Roster
from pevdn.network.world_server import Inside, WorldServer

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
}
NAMES = ("alice", "bob", "carol")
BETWEEN_PARTIES = {
    *("hello", "stored", "reveal", "share", "partial_sum", "masked"),
    *("sum_digest", "recall", "recalled", "farewell"),
}
TO_THE_WORLD = {"hello", "ready", "choice", "farewell"}


class Killed(BaseException):
    """The process is gone: nothing of a party or a world catches this."""


class Three(Coordination):
    """The coordination game with three agents alike, who share one program."""

    def __init__(self) -> None:
        super().__init__(3)
        self.cue_counts = (2, 2, 2)
        self.agents = (self.agents[0],) * 3


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """Agents that are alike, in all tests, share what was compiled: a mind keeps nothing."""
    minds: dict[Any, Any] = {}
    stage: dict[Any, Any] = {}
    real_mind, real_world = parties.Mind, WorldServer.__init__

    def mind(config: Any, spec: Any, agents: int, steps: int) -> Any:
        s = dataclasses.replace(config.settings, eval_every=1, eval_episodes=1)
        key = dataclasses.replace(config, steps=1, seed=0, settings=s), spec, agents, steps
        if key not in minds:
            minds[key] = real_mind(config, spec, agents, steps)
        return minds[key]

    def world(self: WorldServer, *args: Any, **options: Any) -> None:
        real_world(self, *args, **options)
        if isinstance(self.episodes, Inside):
            key = id(self.world)
            self.episodes.programs = stage.setdefault(key, self.episodes.programs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parties, "Mind", mind)
        patch.setattr(WorldServer, "__init__", world)
        yield


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """toy:coordination has three agents."""
    world, real = Three(), worlds.make
    monkeypatch.setattr(worlds, "team_size", lambda env: 3)
    monkeypatch.setattr(worlds, "make", lambda env: world if "coord" in env else real(env))


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


def party_of(team: Roster, name: str) -> Party:
    folder = team.path.parent
    key = roster.private_key(folder / f"{name}.key", team.member(name))
    return Party(team, name, key, folder / f"{name}.data")


def world_of(team: Roster) -> WorldServer:
    folder = team.path.parent
    assert team.world is not None
    key = roster.private_key(folder / "world.key", team.world)
    return WorldServer(team, key, folder / "world.data")


def members_of(team: Roster) -> dict[str, Any]:
    members: dict[str, Any] = {party.name: party_of(team, party.name) for party in team.parties}
    return {**members, "world": world_of(team)}


def play(members: dict[str, Any], timeout: float = 120.0) -> dict[str, str]:
    """Run all to the end; what those who stopped said."""
    return asyncio.run(asyncio.wait_for(_played(members), timeout))


def play_all(teams: list[dict[str, Any]], timeout: float) -> list[dict[str, str]]:
    """Several teams at the same time, where most of the time is waiting."""

    async def together() -> list[dict[str, str]]:
        return await asyncio.wait_for(asyncio.gather(*map(_played, teams)), timeout)

    return asyncio.run(together())


async def _played(members: dict[str, Any]) -> dict[str, str]:
    ended = await asyncio.gather(*(m.run() for m in members.values()), return_exceptions=True)
    wrong = [e for e in ended if e is not None and not isinstance(e, PevdnError)]
    if wrong:
        raise wrong[0]
    return {name: str(e) for name, e in zip(members, ended, strict=True) if e is not None}


def assert_one_sentence(text: str) -> None:
    assert "\n" not in text and text.endswith(".") and "Traceback" not in text, text


def params_of(member: Party) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(member.learner.params)]


def assert_same(a: Party, b: Party) -> None:
    """To the last bit."""
    assert a.course == b.course
    for x, y in zip(jax.tree.leaves(a.learner), jax.tree.leaves(b.learner), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def events(member: Party) -> list[str]:
    lines = (member.folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


# --- a training that was listened to ---------------------------------------------------------


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
            _listen_in(heard, name, member)
    return heard


def _listen_in(heard: Heard, name: str, member: Party) -> None:
    form_sum, act = member._sum, member.mind.act

    async def spied_sum(round: int, words: np.ndarray) -> np.ndarray:
        heard.words[round][name] = words.copy()
        total = await form_sum(round, words)
        heard.opened[round][name] = total.copy()
        return total

    class SpiedMind:
        def __getattr__(self, what: str) -> Any:
            return getattr(mind, what)

        def act(self, params: Any, memory: Any, seen: np.ndarray, *rest: Any) -> Any:
            heard.observed[name] |= {row.tobytes() for row in seen.astype("<f4")}
            return act(params, memory, seen, *rest)

    mind = member.mind
    member._sum, member.mind = spied_sum, SpiedMind()  # type: ignore[method-assign,assignment]


VARIANTS = [("pe-vdn-b", "shares"), ("pe-vdn-b", "pairwise-masks"), ("pe-vdn-c", "shares")]


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def heard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    team = make_team(tmp_path_factory.mktemp("heard") / "team", *request.param)
    members = members_of(team)
    found = listen(members, team)
    assert play(members) == {}
    return found


def test_after_a_hundred_rounds_every_party_is_where_the_simulation_is(heard: Heard) -> None:
    config = heard.team.config
    simulation = Simulation(worlds.make(config.env), config)
    state = jax.jit(simulation.start)(jnp.array([config.seed]))
    advance = jax.jit(simulation.advance)
    counts = [(0, 0, 0)]
    for until in (100, 160):
        state = advance(state, jnp.int32(until), jnp.int32(10**6))
        counts.append((int(state.env_steps[0]), int(state.episodes[0]), int(state.updates[0])))
    assert_near(simulation, state, list(heard.members.values()))
    for member in heard.members.values():
        assert member.course.round >= 100
        found = [(x["env_steps"], x["episodes"], x["updates"]) for x in metrics_of(member.folder)]
        assert found == counts


def test_a_world_outside_of_jax_can_be_hosted(tmp_path: Path) -> None:
    """The two-step game of PettingZoo's kind: bit for bit the training in JAX's."""
    changes = {"parallel_episodes": 3, "eval_episodes": 5}
    there = make_team(tmp_path / "there", env="pettingzoo:tiny_worlds", steps=60, **changes)
    here = make_team(tmp_path / "here", steps=60, **changes)
    played = [members_of(team) for team in (there, here)]
    assert play_all(played, 120) == [{}, {}]
    for name in ("alice", "bob"):
        mine, theirs = played[0][name], played[1][name]
        assert mine.course.updates > 10
        assert metrics_of(mine.folder) == metrics_of(theirs.folder)
        for a, b in zip(params_of(mine), params_of(theirs), strict=True):
            assert np.array_equal(a, b)


def test_a_hosted_world_that_fails_stops_the_team_with_a_sentence(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", env="pettingzoo:tiny_worlds?fails=true", steps=60)
    said = play(members_of(team))
    assert set(said) == {"alice", "bob", "world"}
    for text in said.values():
        assert "raised ValueError: the dice are lost, at step 2 (reset with " in text
        assert_one_sentence(text)


def assert_near(simulation: Simulation, state: Any, members: list[Party]) -> None:
    for kind, learner in zip(simulation.team.kinds, state.learners, strict=True):
        for n, index in enumerate(kind.members):
            wanted = jax.tree.leaves(jax.tree.map(lambda x, n=n: x[0, n], learner.params))
            for mine, theirs in zip(
                params_of(members[index]), map(np.asarray, wanted), strict=True
            ):
                assert np.abs(mine - theirs).max() <= 1e-4 * np.abs(theirs).max()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_a_party_has_learnt_acts_by_itself(heard: Heard) -> None:
    """Loaded from the party's own data: the same values as its mind's, and an error that helps."""
    alice = heard.members["alice"]
    agent = pevdn.load_agent(alice.folder, "running")
    for mine, kept in zip(params_of(alice), jax.tree.leaves(agent.params), strict=True):
        assert np.array_equal(mine, kept)
    available = np.zeros(agent.n_actions, bool)
    available[1] = True
    assert agent.act(np.zeros(agent.observation_size), available) == 1
    with pytest.raises(UsageError, match="was trained without an anchor; use model 'running'"):
        pevdn.load_agent(alice.folder, "anchor")
    with pytest.raises(UsageError, match="holds no data of a party"):
        pevdn.load_agent(heard.team.path.parent)


def test_the_data_of_a_party_are_closed_and_have_a_readme(heard: Heard) -> None:
    """It says of every file what it is; that a rehearsal hides nothing, too."""
    for member in heard.members.values():
        assert member.folder.stat().st_mode & 0o777 == 0o700
        page = (member.folder / "README.md").read_text()
        for file in member.folder.iterdir():
            name = re.sub(r"\d+", "*", file.name)
            assert name in (".lock", "README.md") or f"`{name}`" in page, name
        assert ("with differential privacy" in page) == heard.team.config.private
        assert "This is a rehearsal" in page and str(member.folder) not in page


def test_a_party_writes_the_metrics_of_a_run(heard: Heard) -> None:
    wanted = ["seed", "env_steps", "episodes", "updates", "win_rate", "return", "episode_length"]
    if heard.team.config.private:
        wanted += Spent._fields
    written = [metrics_of(member.folder) for member in heard.members.values()]
    assert all(list(line) == wanted for line in written[0])
    assert all(lines == written[0] for lines in written)


# --- the sum ---------------------------------------------------------------------------------


def test_every_opened_sum_is_the_integer_sum_of_the_encoded_messages(heard: Heard) -> None:
    p = heard.team.config.settings.modulus
    assert len(heard.words) == heard.members["alice"].course.updates > 60
    for round, words in heard.words.items():
        assert set(words) == set(heard.members)
        total = sum(w.astype(object) for w in words.values()) % p
        for opened in heard.opened[round].values():
            assert np.array_equal(opened.astype(object), total)


# --- what leaves a party ---------------------------------------------------------------------


def leaks(heard: Heard) -> list[str]:
    """Everything that left a party and is not what the schema allows, in words."""
    found = []
    for sender, to, data in heard.said:
        if sender == "world":
            continue
        if any(seen in data for seen in heard.observed[sender]):
            found.append(f"{sender} told {to} what it saw")
        receipt, envelope = wire.Receipt(), wire.Envelope()
        if _is(receipt, data) and receipt.status:
            continue
        if not _is(envelope, data):
            found.append(f"{sender} told {to} what is not in the schema")
            continue
        kind = envelope.WhichOneof("body")
        if envelope.sender != sender or envelope.run != heard.team.run:
            found.append(f"{sender} told {to} something as somebody else")
        if kind not in (TO_THE_WORLD if to == "world" else BETWEEN_PARTIES):
            found.append(f"{sender} told {to} a {kind}")
        if kind in ("share", "partial_sum", "masked"):
            words = np.frombuffer(getattr(envelope, kind).words, "<u4")
            if len(words) != len(heard.words[envelope.round][sender]):
                found.append(f"{sender} told {to} a {kind} of another length")
            if np.isin(words, heard.words[envelope.round][sender]).sum() > 0.1 * len(words):
                found.append(f"{sender} told {to} its own messages")
    return found


def _is(message: Any, data: bytes) -> bool:
    """Whether the bytes are this message and nothing more."""
    try:
        message.ParseFromString(data)
    except Exception:
        return False
    size = message.ByteSize()
    message.DiscardUnknownFields()
    return size == message.ByteSize() == len(data)


def test_all_that_leaves_a_party_is_of_the_schema_and_nothing_that_it_saw(heard: Heard) -> None:
    assert leaks(heard) == []
    kinds: set[tuple[str, str]] = set()
    for sender, to, data in heard.said:
        envelope = wire.Envelope()
        if sender != "world" and _is(envelope, data):
            kinds.add((to if to == "world" else "peer", str(envelope.WhichOneof("body"))))
    vector = {"masked"} if heard.team.mode == "pairwise-masks" else {"share", "partial_sum"}
    always = {"hello", "stored", "reveal", "sum_digest", "farewell"}
    assert {kind for to, kind in kinds if to == "peer"} == always | vector
    assert {kind for to, kind in kinds if to == "world"} == TO_THE_WORLD


def test_with_noise_the_size_of_what_is_sent_does_not_tell_the_sample(heard: Heard) -> None:
    """Without noise as many words are sent as steps were played in the minibatch."""
    sizes = set()
    for sender, _, data in heard.said:
        envelope = wire.Envelope()
        if sender != "world" and _is(envelope, data):
            body = getattr(envelope, str(envelope.WhichOneof("body")))
            sizes |= {len(body.words) // 4} if hasattr(body, "words") else set()
    batch, steps = heard.team.config.settings.expected_batch_size, 2
    most = math.ceil(batch + 4 * math.sqrt(batch)) * steps  # exceeded once in thousands of rounds
    assert sizes == {most if heard.team.config.private else batch * steps}


def test_what_a_peer_is_sent_looks_uniform(heard: Heard) -> None:
    """Bits of the shares, or masked words, that alice sent: as many ones as zeros, everywhere."""
    kind = "masked" if heard.team.mode == "pairwise-masks" else "share"
    sent = {}
    for sender, to, data in heard.said:
        envelope = wire.Envelope()
        ours = sender == "alice" and to == "bob" and _is(envelope, data)
        if ours and envelope.WhichOneof("body") == kind:
            sent[envelope.round] = getattr(envelope, kind).words
    bits = np.unpackbits(np.frombuffer(b"".join(sent.values()), np.uint8).reshape(-1, 4), axis=1)
    assert heard.team.config.settings.modulus == 2**32
    deviation = 0.5 / np.sqrt(len(bits))
    assert len(bits) > 500
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 5 * deviation)


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


def test_an_observation_in_a_share_is_found(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=16)
    members = members_of(team)
    heard = listen(members, team)

    def planted(to: str, envelope: wire.Envelope) -> None:
        seen = next(iter(heard.observed["alice"]), b"")
        words = envelope.share.words
        if envelope.HasField("share") and len(words) > len(seen):
            envelope.share.words = words[: -len(seen)] + seen

    lie(members["alice"], planted)
    play(members)
    assert set(leaks(heard)) == {"alice told bob what it saw"}


def test_an_observation_in_an_extra_field_is_found_and_refused(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=16, patience=5)
    members = members_of(team)
    heard = listen(members, team)

    def planted(to: str, envelope: wire.Envelope) -> bytes | None:
        if not envelope.HasField("stored"):
            return None
        seen = next(iter(heard.observed["alice"]))
        return envelope.SerializeToString() + b"\xfa\x07" + bytes([len(seen)]) + seen  # field 127

    lie(members["alice"], planted)
    said = play(members)
    assert set(leaks(heard)) == {
        "alice told bob what it saw",
        "alice told bob what is not in the schema",
    }
    assert "bob refused what alice said in round 2: unknown or repeated fields." in said["alice"]


def test_a_party_that_sends_its_own_messages_bare_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "split", lambda words, n, *_: np.stack([0 * words, words]))
    team = make_team(tmp_path / "team", steps=16)
    members = members_of(team)
    heard = listen(members, team)
    play(members)
    assert set(leaks(heard)) == {
        "alice told bob its own messages",
        "bob told alice its own messages",
    }


# --- members that lie ------------------------------------------------------------------------


def to_the_end(members: dict[str, Any]) -> dict[str, list[list[np.ndarray]]]:
    """Parameters of every party after every round, as they come."""
    history: dict[str, list[list[np.ndarray]]] = {}
    for name, member in members.items():
        if isinstance(member, Party):
            rounds = history[name] = [params_of(member)]

            def apply(
                record: Any,
                thought: Any = None,
                real: Any = member._apply,
                m: Any = member,
                rounds: Any = rounds,
            ) -> None:
                real(record, thought)
                rounds.append(params_of(m))

            member._apply = apply  # type: ignore[method-assign]
    return history


def assert_stopped_in(
    team: Roster, members: dict[str, Any], history: Any, said: dict[str, str], what: str
) -> None:
    """All stopped, for the same reason, and nobody learnt from the round that went wrong."""
    assert set(said) == set(members)
    for text in said.values():
        assert_one_sentence(text)
        assert what in text, text
    least = min(m.course.round for m in members.values() if isinstance(m, Party))
    for name, rounds in history.items():
        assert all(map(np.array_equal, params_of(members[name]), rounds[least]))
        again = party_of(team, name)
        assert again.course == members[name].course
        assert all(map(np.array_equal, params_of(again), rounds[least]))


def reveals_another_nonce(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("reveal") and envelope.round > 2:
        envelope.reveal.nonce = bytes(32)


def tells_carol_another_sum(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("partial_sum") and to == "carol":
        envelope.partial_sum.words = bytes(4) + envelope.partial_sum.words[4:]


def masks_carols_otherwise(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("masked") and to == "carol":
        envelope.masked.words = bytes(4) + envelope.masked.words[4:]


def pays_alice_more(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("sight") and to == "alice" and envelope.round > 2:
        rewards = np.frombuffer(envelope.sight.rewards, "<f4") + np.float32(1)
        envelope.sight.rewards = rewards.tobytes()


def pays_alice_more_when_it_counts(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("sight") and to == "alice" and envelope.round == 1:  # an evaluation
        rewards = np.frombuffer(envelope.sight.rewards, "<f4") + np.float32(1)
        envelope.sight.rewards = rewards.tobytes()


def shares_too_little(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("share"):
        envelope.share.words = envelope.share.words[:-4]


def shows_too_little(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("sight") and to == "alice":
        envelope.sight.observations = envelope.sight.observations[:-4]


def chooses_what_is_not_there(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("choice") and envelope.round > 2:
        envelope.choice.actions = b"\xff\xff" * (len(envelope.choice.actions) // 2)


LIES = [
    ("bob", reveals_another_nonce, "shares", "bob revealed another part of the seed in round"),
    ("bob", tells_carol_another_sum, "shares", "have different sums in round"),
    ("bob", masks_carols_otherwise, "pairwise-masks", "have different sums in round"),
    ("world", pays_alice_more, "shares", "were told different rewards, lengths or ends"),
    ("world", pays_alice_more_when_it_counts, "shares", "have different scores in round 1"),
    ("bob", shares_too_little, "shares", "bob sent "),
    ("world", shows_too_little, "shares", "the world sent step 0 of round 1 in another shape"),
    ("bob", chooses_what_is_not_there, "shares", "bob chose actions that do not exist"),
]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(("who", "change", "mode", "what"), LIES)
def test_who_lies_stops_the_team_before_anybody_learns_from_it(
    who: str, change: Any, mode: str, what: str, tmp_path: Path
) -> None:
    team = make_team(
        tmp_path / "team", mode=mode, env="toy:coordination", parties=3, steps=60, patience=10
    )
    members = members_of(team)
    history = to_the_end(members)
    lie(members[who], change)
    said = play(members)
    assert_stopped_in(team, members, history, said, what)


def test_with_dp_a_message_that_does_not_fit_stops_nobody(tmp_path: Path) -> None:
    team = make_team(
        tmp_path / "team", "pe-vdn-c", env="toy:coordination", steps=60, precision=7, modulus=2**20
    )
    members = members_of(team)
    assert play(members) == {}
    assert members["bob"].course.updates > 0


def test_a_message_that_does_not_fit_stops_the_team(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=40, patience=10)
    members = members_of(team)
    bob = members["bob"]
    bob.learner = jax.tree.map(lambda x: x * np.asarray(1e9, x.dtype), bob.learner)
    history = to_the_end(members)
    said = play(members)
    assert_stopped_in(team, members, history, said, "a message of bob does not fit into ±")


# --- members that are not alike --------------------------------------------------------------


def older(hello: wire.Hello) -> None:
    hello.version = "0.0.1"


def other_protocol(hello: wire.Hello) -> None:
    hello.protocol += 1


def slow(hello: wire.Hello) -> None:
    hello.clock -= 500


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (older, "bob runs pevdn 0.0.1"),
        (other_protocol, f"(protocol {councils.PROTOCOL + 1})"),
        (slow, "are 500 seconds apart, and may be 120"),
    ],
)
def test_other_versions_protocols_and_clocks_are_refused_before_the_first_episode(
    change: Any, what: str, tmp_path: Path
) -> None:
    team = make_team(tmp_path / "team", patience=3)
    members = members_of(team)
    heard = listen(members, team)

    def changed(to: str, envelope: wire.Envelope) -> None:
        if envelope.HasField("hello"):
            change(envelope.hello)

    lie(members["bob"], changed)
    said = play(members)
    assert set(said) == set(members)
    for text in said.values():
        assert_one_sentence(text)
        assert "bob" in text and what in text
    assert_before_the_first_episode(heard)


def test_other_settings_are_refused_before_the_first_episode(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", patience=5)
    settings = dataclasses.replace(team.config.settings, gamma=0.5)
    other = dataclasses.replace(team, config=dataclasses.replace(team.config, settings=settings))
    members = {"alice": party_of(team, "alice"), "bob": party_of(other, "bob")}
    members["world"] = world_of(team)  # type: ignore[assignment]
    heard = listen(members, team)
    said = play(members)
    assert set(said) == set(members)
    for text in said.values():
        assert_one_sentence(text)
        assert "bob" in text and "have different rosters: settings.gamma is " in text
        assert "0.5" in text
    assert_before_the_first_episode(heard)


def assert_before_the_first_episode(heard: Heard) -> None:
    kinds = set()
    for _, _, data in heard.said:
        envelope = wire.Envelope()
        if _is(envelope, data):
            kinds.add(envelope.WhichOneof("body"))
    assert kinds <= {"hello", "farewell", None}
    assert all(member.course.round == 0 for member in heard.members.values())


# --- members that die ------------------------------------------------------------------------


class Fate:
    """Kills a member at the n-th of its messages and writes to disk, n drawn anew for every life.

    A write is killed before it, after it, or, if it is a line, in the middle.
    """

    def __init__(self, seed: int, deaths: int) -> None:
        self.dice, self.deaths = random.Random(seed), deaths
        self.updates = 0  # that were made with noise in all lives, but while one began

    def of(self, member: Any) -> None:
        self.left, self.dead = self.dice.randrange(1, 60), False
        transport = member.group.transport
        self.wrap(transport, "send")
        if not isinstance(member, Party):
            return
        for what in ("append", "keep", "save"):
            self.wrap(member.journal, what)
        if member.ledger is not None:
            self.wrap(member.ledger, "_append")
            noise = member.draws.noise

            def counted(*args: Any) -> Any:
                self.updates += 1
                return noise(*args)

            member.draws.noise = counted  # type: ignore[method-assign]

    def wrap(self, holder: Any, what: str) -> None:
        real = getattr(holder, what)

        def now() -> bool:
            self.left -= 1
            if self.left == 0 and self.deaths:
                self.deaths, self.dead = self.deaths - 1, True
                return True
            if self.dead:  # it sends and writes nothing any more
                raise Killed(what)
            return False

        def done(*args: Any, **options: Any) -> Any:
            if not now():
                return real(*args, **options)
            when = self.dice.choice(["before", "after", "half"])
            if when == "after":
                real(*args, **options)
            elif when == "half" and what == "append":
                with holder._path().open("ab") as file:
                    file.write(b'{"round": 7, "wor')
            elif when == "half" and what == "_append":
                with (holder.folder / "ledger.jsonl").open("ab") as file:
                    file.write(b'{"line": 7, "ki')
            raise Killed(what)

        async def sent(*args: Any, **options: Any) -> Any:
            if not now():
                return await real(*args, **options)
            if self.dice.random() < 0.5:
                await real(*args, **options)
            raise Killed(what)

        setattr(holder, what, sent if what == "send" else done)


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
    return team, roster.read(out / "two" / "team.toml")


def assert_files_whole(member: Party) -> None:
    """What is on disk is a chain of rounds, and no update is missing in the ledger."""
    found = journals.Journal(member.folder).load()
    assert found is not None
    _, facts, records = found
    first = facts["course"]["round"] + 1
    assert [record.round for record in records] == list(range(first, first + len(records)))


@pytest.mark.parametrize(
    ("algorithm", "mode", "rehearsal", "snapshot"),
    [("pe-vdn-b", "pairwise-masks", True, 200), ("pe-vdn-c", "shares", False, 7)],
)
def test_a_team_whose_members_die_ends_where_one_that_is_left_alone_does(
    algorithm: str,
    mode: str,
    rehearsal: bool,
    snapshot: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parties, "SNAPSHOT", snapshot)
    calm, wild = twins(tmp_path, algorithm, mode, steps=100, rehearsal=rehearsal)
    members = members_of(calm)
    assert play(members) == {}
    fates = {name: Fate(seed, deaths=5) for seed, name in enumerate(wild.names)}
    made: dict[str, int] = defaultdict(int)

    def check(member: Any) -> None:
        if not isinstance(member, Party):
            return
        assert_files_whole(member)
        assert member.course.round >= made[member.me] - 1
        made[member.me] = member.course.round
        if member.ledger is not None:
            ledger = Ledger.read(member.folder, fingerprint(wild.config))
            assert ledger.counted[0] >= fates[member.me].updates

    survivors = play_on(wild, fates, check)
    assert [fate.deaths for fate in fates.values()] == [0, 0, 0]
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])
        assert metrics_without_cost(survivors[name]) == metrics_without_cost(members[name])
        if survivors[name].ledger is not None:
            counted = Ledger.read(survivors[name].folder, fingerprint(wild.config))
            wanted = members[name].course.updates
            assert counted.counted[0] >= max(fates[name].updates, wanted)
            assert counted.exposure[0] >= members[name].ledger.exposure[0]


def metrics_without_cost(member: Party) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in Spent._fields}
        for line in metrics_of(member.folder)
    ]


class DiesBefore:
    """Kills a party once, before it writes down a round of a kind that its peers complete."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def of(self, member: Party) -> None:
        append, kind = member.journal.append, self.kind

        def dies(record: Any) -> None:
            if record.kind == self.kind:
                self.kind = ""
                raise Killed(kind)
            append(record)

        member.journal.append = dies  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["play", "update", "evaluate"])
def test_a_party_that_missed_the_end_of_a_round_is_told_by_its_peers(
    kind: str, tmp_path: Path
) -> None:
    calm, wild = twins(tmp_path, steps=16)
    members = members_of(calm)
    assert play(members) == {}
    fates = {"alice": Safe(), "bob": DiesBefore(kind), "world": Safe()}
    survivors = play_on(wild, fates)
    assert events(survivors["bob"]).count("caught up") == 1
    assert "caught up" not in events(survivors["alice"])
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])


def test_who_is_told_nonsense_about_a_round_does_not_write_it_down(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=16, patience=5)

    class Forgetful:
        def of(self, member: Party) -> None:
            def wrong(round: int) -> wire.Recalled:
                return wire.Recalled(kind="update", words=bytes(8))

            member.group.on_recall = wrong

    with pytest.raises(PevdnError, match="alice told bob of an end of round"):
        play_on(team, {"alice": Forgetful(), "bob": DiesBefore("update"), "world": Safe()})
    alice, bob = party_of(team, "alice"), party_of(team, "bob")
    assert bob.course.round == alice.course.round - 1


def test_independent_learners_stay_together_and_tell_no_message(tmp_path: Path) -> None:
    calm, wild = twins(tmp_path, "iql", steps=40, parallel_episodes=4)
    members = members_of(calm)
    heard = listen(members, calm)
    assert play(members) == {}
    said = set()
    for _, _, data in heard.said:
        envelope = wire.Envelope()
        if _is(envelope, data):
            said.add(envelope.WhichOneof("body"))
    assert not said & {"share", "partial_sum", "masked", "plain"}
    fates = {"alice": Safe(), "bob": DiesBefore("update"), "world": Safe()}
    survivors = play_on(wild, fates)
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])
        last = [r for r in journals.Journal(survivors[name].folder).load()[2]]  # type: ignore[index]
        assert all(len(record.words) == 0 for record in last if record.kind == "update")


class DiesAtTheEnd:
    """Kills a member once, after its last round and before it said farewell."""

    def __init__(self) -> None:
        self.alive = True

    def of(self, member: Any) -> None:
        part = member.group.part

        async def dies(names: Any) -> bool:
            if self.alive:
                self.alive = False
                raise Killed
            return bool(await part(names))

        member.group.part = dies


def test_a_party_that_dies_after_the_last_round_keeps_nobody_waiting(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=4, patience=30)
    began = time.monotonic()
    survivors = play_on(team, {"alice": Safe(), "bob": DiesAtTheEnd(), "world": Safe()})
    assert time.monotonic() - began < 20
    assert survivors["bob"].parted
    began = time.monotonic()
    assert play({"alice": party_of(team, "alice")}) == {}  # started again: there is nothing to do
    assert time.monotonic() - began < 2


def test_the_clock_of_one_that_waited_for_long_is_not_thought_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(councils, "CLOCKS_APART", 1.0)
    monkeypatch.setattr(councils, "GREETING", 0.3)
    team = make_team(tmp_path / "team", steps=4)
    members = members_of(team)
    run = members["bob"].run

    async def late() -> None:
        await asyncio.sleep(2.5)
        await run()

    members["bob"].run = late
    assert play(members) == {}


def test_one_that_never_comes_is_named_by_the_others(tmp_path: Path) -> None:
    missing = ["bob", "world"]
    teams = [members_of(make_team(tmp_path / name, patience=2)) for name in missing]
    for name, members in zip(missing, teams, strict=True):
        del members[name]
    for name, members, said in zip(missing, teams, play_all(teams, 20), strict=True):
        assert set(said) == set(members)
        for text in said.values():
            assert_one_sentence(text)
            assert f"{name} did not answer for 2 seconds; everything is saved" in text


def dies_for_good(member: Any, after: int) -> None:
    """Kills a member at one of its messages."""
    run, send, sent = member.run, member.group.transport.send, 0

    async def until_it_dies(*args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent > after:
            raise Killed
        return await send(*args, **options)

    async def gone() -> None:
        with contextlib.suppress(Killed):
            await run()

    member.group.transport.send, member.run = until_it_dies, gone


def test_one_that_never_comes_back_is_named_by_the_others_who_save(tmp_path: Path) -> None:
    cases = [("bob", 9), ("bob", 24), ("bob", 25), ("world", 20)]
    rosters = [make_team(tmp_path / f"{name}-{after}", patience=3) for name, after in cases]
    teams = [members_of(team) for team in rosters]
    for (name, after), members in zip(cases, teams, strict=True):
        dies_for_good(members[name], after)
    ended = play_all(teams, 30)
    for (name, _), team, members, said in zip(cases, rosters, teams, ended, strict=True):
        assert set(said) == set(members) - {name}
        for text in said.values():
            assert_one_sentence(text)
            assert f"{name} did not answer for 3 seconds; everything is saved" in text
        alice = party_of(team, "alice")
        assert alice.course == members["alice"].course
        assert json.loads((alice.folder / "status.json").read_text())["state"] == "stopped"


# --- as processes ----------------------------------------------------------------------------


def start_member(team: Roster, name: str) -> subprocess.Popen[str]:
    which = ["world"] if name == "world" else ["party", "--me", name]
    return start(*which, "--team", team.path, "--json")


def round_of(team: Roster) -> int:
    return int(local.reports(team).get("alice", {}).get("round", 0))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pe-vdn-b", "pe-vdn-c"])
def test_processes_that_are_killed_end_where_others_do(algorithm: str, tmp_path: Path) -> None:
    rehearsal = algorithm == "pe-vdn-b"
    calm, wild = twins(tmp_path, algorithm, steps=600, rehearsal=rehearsal)
    members = members_of(calm)
    assert play(members, 300) == {}
    dice = random.Random(6)
    processes = {name: start_member(wild, name) for name in wild.names}
    deadline = time.monotonic() + 540
    ended: dict[str, Said] = {}
    try:
        for victim in ["bob", "world", "alice", "bob", "world", "alice"]:
            before, until = round_of(wild), time.monotonic() + 60
            while round_of(wild) <= before + dice.randrange(10) and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(dice.random())
            if processes[victim].poll() is not None:
                break
            processes[victim].send_signal(signal.SIGKILL)
            processes[victim].communicate()
            processes[victim] = start_member(wild, victim)
        for name, process in processes.items():
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended[name] = Said(process.returncode, out, err)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [said.code for said in ended.values()] == [0, 0, 0], ended
    for name in ("alice", "bob"):
        assert_same(party_of(wild, name), members[name])
        if not rehearsal:
            ledger = Ledger.read(wild.path.parent / f"{name}.data", fingerprint(wild.config))
            assert ledger.counted[0] >= members[name].course.updates


@pytest.mark.slow
def test_four_processes_learn_3m_as_the_simulation_does(tmp_path: Path) -> None:
    settings = {**SMALL, "hidden_size": 16, "eval_every": 10_000, "parallel_episodes": 4}
    config = configuration.make("pe-vdn-b", "smax-sc2:3m", 5000, 1, 0, settings)
    team = local.make(tmp_path / "team", config, "shares", 300.0, True)
    reports = local.up(team, lambda _: None)
    assert {report["state"] for report in reports.values()} == {"finished"}
    simulation = Simulation(worlds.make(config.env), config)
    state = jax.jit(simulation.start)(jnp.array([0]))
    state = jax.jit(simulation.advance)(state, jnp.int32(5000), jnp.int32(10**6))
    members = [party_of(team, party.name) for party in team.parties]
    assert members[0].course.round >= 200
    assert members[0].course.updates == int(state.updates[0])
    assert_near(simulation, state, members)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["iql", "pe-vdn-a", "pe-vdn-b", "pe-vdn-c"])
def test_a_team_writes_the_metrics_that_a_simulated_run_writes(
    algorithm: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"average_decay": 0.9}
    if algorithm == "pe-vdn-c":
        changes |= {"anchor": True, "anchor_threshold": 0.3}
    team = make_team(tmp_path / "team", algorithm, steps=300, **changes)
    members = members_of(team)
    assert play(members) == {}
    settings = {**SETTINGS[algorithm], **changes}
    run = pevdn.train(
        algorithm, "toy:two-step", steps=300, out=tmp_path / "run", seed=0, **settings
    )
    found, wanted = metrics_of(members["alice"].folder), run.metrics
    assert [list(line) for line in found] == [list(line) for line in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        empty = [name for name, value in theirs.items() if value is None]
        assert all(mine.pop(name) is theirs.pop(name) is None for name in empty)
        assert mine == pytest.approx(theirs, rel=1e-4)
