"""Openings of pe-vdn-d: whatever happens, one noisy version of a record leaves a party."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from network_team import (
    Killed,
    Safe,
    assert_near,
    assert_same,
    events,
    make_team,
    members_of,
    metrics_of,
    party_of,
    play,
    play_on,
    play_until_killed,
    twins,
)

from pevdn import worlds
from pevdn.agent.packed_replay import PackedReplay
from pevdn.config.experiment import fingerprint
from pevdn.errors import PevdnError
from pevdn.network import keys, roster_file
from pevdn.network.membership import Stopped
from pevdn.network.party import Party
from pevdn.network.protocol import Protocol
from pevdn.network.recovery import Journal, Outcome
from pevdn.network.roster import Roster
from pevdn.network.state import PartyState
from pevdn.privacy.ledger import Ledger
from pevdn.privacy.planner import Plan
from pevdn.simulation.program import Simulation
from pevdn.worlds.toy import Coordination

pytestmark = pytest.mark.usefixtures("shared_programs")

SIXTH = 6  # opening: of its own block, and of one that was opened before
Entered = dict[tuple[str, int], list[tuple[int, ...]]]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Entered:
    """All words that a party began to send, by party and step."""
    found: Entered = defaultdict(list)
    real = Protocol.open_sum

    async def spied(one: Protocol, step: int, words: np.ndarray) -> np.ndarray:
        found[one.me, step].append(tuple(words.tolist()))
        return await real(one, step, words)

    monkeypatch.setattr(Protocol, "open_sum", spied)
    return found


class DiesWhile:
    """Kills a party once, in its sixth opening."""

    def __init__(self, doing: str) -> None:
        self.doing, self.left = doing, SIXTH
        self.step = 0  # in which it died

    def of(self, member: Party) -> None:
        ledger, send = member.state.ledger, member.group.transport.send
        assert ledger is not None
        book, settle, append = ledger.book_opening, ledger.settle, member.state.journal.append

        def die(doing: str) -> None:
            if doing == self.doing and self.left == 0 and not self.step:
                self.step = member.state.progress.step + 1
                raise Killed(doing)

        def booked(step: int, digest: str) -> None:
            book(step, digest)
            self.left -= self.left > 0
            die("booking")

        async def sent(to: str, envelope: Any, *, until: float | None) -> Any:
            receipt = await send(to, envelope, until=until)
            if envelope.HasField("share") or envelope.HasField("masked"):
                die("sharing")
            return receipt

        def written(outcome: Any) -> None:
            if outcome.kind == "open":
                die("opening")
            append(outcome)

        def settled(*args: Any) -> None:
            settle(*args)
            die("learning")

        ledger.book_opening, ledger.settle = booked, settled  # type: ignore[method-assign]
        member.group.transport.send = sent  # type: ignore[method-assign,assignment]
        member.state.journal.append = written  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("doing", "mode"),
    [
        ("booking", "shares"),
        ("sharing", "shares"),
        ("sharing", "pairwise-masks"),
        ("opening", "shares"),
        ("learning", "pairwise-masks"),
    ],
)
def test_an_opening_that_is_tried_again_has_the_same_words_and_the_same_end(
    doing: str, mode: str, entered: Entered, tmp_path: Path, one_salt: None
) -> None:
    calm, wild = twins(tmp_path, "pe-vdn-d", mode, steps=32, rehearsal=False)
    members = members_of(calm)
    assert play(members) == {}
    undisturbed = {at: words for at, (words,) in entered.items()}
    entered.clear()
    bob = DiesWhile(doing)
    survivors = play_on(wild, {"alice": Safe(), "bob": bob, "world": Safe()})
    assert {at: set(words) for at, words in entered.items()} == {
        at: {words} for at, words in undisturbed.items()
    }
    tries = [len(entered[name, bob.step]) for name in ("alice", "bob")]
    assert tries == {"booking": [2, 1], "sharing": [2, 2]}.get(doing, [1, 1])
    assert len(set(undisturbed.values())) == len(undisturbed)  # fresh noise in every opening
    assert events(survivors["bob"]).count("caught up") == (doing == "opening")
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])
        assert survivors[name].state.replay.rows == members[name].state.replay.rows


@pytest.mark.parametrize("doing", ["booking", "sharing", "opening", "learning"])
def test_a_restart_brings_new_noise_but_never_a_second_version_of_an_opening(
    doing: str, entered: Entered, tmp_path: Path
) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=32, rehearsal=False)
    bob = DiesWhile(doing)
    survivors = play_on(team, {"alice": Safe(), "bob": bob, "world": Safe()})
    assert bob.step and all(len(set(words)) == 1 for words in entered.values())
    ledger = survivors["bob"].state.ledger
    assert ledger is not None
    assert ledger.salt(bob.step) == ledger.nonce != ledger.salt(bob.step + 1)


def copies_of_bob(team: Roster) -> list[PartyState]:
    """Two restarts of a party, each from the same files."""
    found = []
    for name in ("first", "second"):
        copied = shutil.copytree(team.path.parent, team.path.parent.with_name(name))
        found.append(party_of(roster_file.read(copied / team.path.name), "bob").state)
    return found


@pytest.mark.parametrize("played", [False, True])
def test_a_party_that_goes_on_from_a_backup_draws_other_numbers(
    played: bool, tmp_path: Path
) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=16, rehearsal=False)
    members = members_of(team)
    if played:
        assert play(members) == {}
    drawn = []
    for state in copies_of_bob(team):
        step = state.progress.step + 1
        state._take_salt(step)
        random = state.random
        openings, noise = random.opening(step, 0, 0, 2), random.noise(step, 0, 0, 4)
        drawn.append([openings, noise, random.minibatch(b"", 0, 0)])
    assert not any(map(np.array_equal, *drawn))


def test_a_booked_opening_with_another_sum_is_learnt_from_with_other_numbers(
    tmp_path: Path,
) -> None:
    """A backup holds a booked opening; afterwards, a peer entered other words in each copy."""
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=32, rehearsal=False)
    members = members_of(team)
    DiesWhile("booking").of(members["bob"])
    play_until_killed(members)
    words, drawn = [], []
    for change, state in zip((0, 1), copies_of_bob(team), strict=True):
        assert state.next_kind() == "open"
        offers, real = state.offers(), state.random.noise
        words.append(offers.words)
        drawn.append([])

        def spied(*args: Any, real: Any = real) -> np.ndarray:
            drawn[-1].append(real(*args))
            return drawn[-1][-1]

        state.random.noise = spied  # type: ignore[method-assign]
        total = offers.words + np.uint32(change)
        state.apply(Outcome(state.progress.step + 1, "open", total), offers)
    assert np.array_equal(*words)
    assert len(drawn[0]) == len(drawn[1]) == team.config.updates_due
    assert not any(map(np.array_equal, *drawn))


def test_a_party_that_begins_anew_with_an_old_secret_does_not_reuse_its_noise(
    tmp_path: Path,
) -> None:
    """All but `secret` is deleted."""
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=16, rehearsal=False)
    members = members_of(team)
    assert play(members) == {}
    bob = members["bob"]
    bob.state._take_salt(3)
    before = [bob.state.random.opening(3, 0, 0, 2), bob.state.random.noise(3, 0, 0, 4)]
    for path in bob.folder.iterdir():
        if path.name != "secret":
            path.unlink()
    again = party_of(team, "bob").state
    again._take_salt(3)
    after = [again.random.opening(3, 0, 0, 2), again.random.noise(3, 0, 0, 4)]
    assert not any(map(np.array_equal, before, after))


def test_a_block_that_is_caught_up_with_is_the_one_that_the_team_compared(tmp_path: Path) -> None:
    """The facts in the outcome are those of another attempt than the episodes on this disk."""
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=16, rehearsal=False)
    members = members_of(team)
    assert play(members) == {}
    bob = members["bob"]
    step, block = bob.state.progress.step + 1, bob.state.progress.blocks
    same = np.frombuffer(bytes(range(32)), np.uint32)
    assert not bob._is_plausible(Outcome(step, "play", same), "play", None)
    bob.state.journal.write_block(block, PackedReplay(2), bytes(range(32)))
    assert bob._is_plausible(Outcome(step, "play", same), "play", None)
    assert not bob._is_plausible(Outcome(step, "play", same[::-1].copy()), "play", None)


def other_record(bob: Party) -> None:
    """The newest block, in which the team was paid more."""
    journal, block = Journal(bob.folder), bob.state.progress.blocks - 1
    episodes = journal.read_block(block)
    assert episodes is not None
    batch = bob.state.agent._fetch(episodes, np.arange(2), 2)
    changed = PackedReplay(2)
    for e in range(2):
        one = batch.map(lambda x, e=e: x[:, e] if x.ndim > 1 else x[e])
        changed.store(e, one._replace(rewards=one.rewards + np.float32(0.01)))
    journal.write_block(block, changed, journal.facts(block) or b"")


def other_parameters(bob: Party) -> None:
    journal = Journal(bob.folder)
    arrays, facts = journal.snapshot() or ({}, {})
    arrays["0"] = arrays["0"] + np.float32(0.01)
    journal.save(facts["progress"]["step"], arrays, facts)


@pytest.mark.parametrize("change", [other_record, other_parameters])
def test_a_booked_opening_of_other_messages_is_refused(
    change: Any, entered: Entered, tmp_path: Path
) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=32, patience=5, rehearsal=False)
    bob = DiesWhile("booking")
    fates = {"alice": Safe(), "bob": bob, "world": Safe()}
    with pytest.raises(
        PevdnError, match="two noisy versions of the same records would be revealed"
    ):
        play_on(team, fates, change)
    assert bob.step and entered["alice", bob.step] and not entered["bob", bob.step]


def test_what_was_opened_is_in_the_snapshot(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=40)
    members = members_of(team)
    assert play(members) == {}
    for name in ("alice", "bob"):
        mine, again = members[name].state, party_of(team, name).state
        opened = [mine.replay.opened(slot) for slot in range(16)]
        assert all(len(row) == 2 and np.all(row != 0) for row in opened)
        assert again.replay.rows == mine.replay.rows and np.all(
            again.replay.length == mine.replay.length
        )


def test_files_of_another_version_are_refused_in_one_sentence(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=16)
    bob = members_of(team)["bob"]
    arrays, facts = bob.state.journal.snapshot() or ({}, {})
    bob.state.journal.save(0, arrays, {k: v for k, v in facts.items() if k != "protocol"})
    with pytest.raises(PevdnError, match="was written by another version of pevdn; finish"):
        party_of(team, "bob")


def test_an_error_in_the_middle_of_a_step_leaves_the_snapshot_before_it(
    tmp_path: Path, one_salt: None
) -> None:
    """What was settled until then is made again, to the same bits."""
    calm, wild = twins(tmp_path, "pe-vdn-d", steps=32, rehearsal=False, patience=5)
    members = members_of(calm)
    assert play(members) == {}
    broken = members_of(wild)
    settle, left = broken["bob"].state.ledger.settle, [8]  # the second update of a block

    def fails(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PevdnError("the disk is full.")
        settle(*args)

    broken["bob"].state.ledger.settle = fails
    said = play(broken)
    assert "the disk is full." in said["bob"]
    again = members_of(wild)
    assert play(again) == {}
    for name in ("alice", "bob"):
        assert_same(again[name], members[name])
        lost = [name == "bob"]  # reserved and not settled
        assert again[name].state.ledger.lost == lost


def test_lost_updates_stop_a_party_before_an_opening_that_it_cannot_afford(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-d", steps=16)
    members = members_of(team)
    assert play(members) == {}
    state = members["bob"].state
    exposure = state.progress.current_exposure(team.config)
    state.progress = state.progress.__class__(**{**vars(state.progress), "considered": 0})
    assert state.progress.next_kind(team.config) == "open"
    for affordable, lost, stops in [
        (exposure + 2, 0, False),
        (exposure + 2, 1, True),
        (exposure + 3, 1, False),
        (exposure + 1, 1, True),
        (exposure, 5, False),  # the budget is spent: no update will be made
    ]:
        state._affordable, state.ledger._crashed = affordable, lost
        state.next_kind(replaying=True)
        if stops:
            with pytest.raises(Stopped, match="the privacy budget of bob is spent"):
                state.next_kind()
        else:
            assert state.next_kind() == "open"


def test_a_crash_in_the_last_affordable_update_stops_a_party_within_its_budget(
    tmp_path: Path,
) -> None:
    limited: dict[str, Any] = {"steps": 60, "delta": 1e-3}
    unlimited = make_team(tmp_path / "first", "pe-vdn-d", **limited)
    budget = Plan.of(unlimited.config, 2).mechanism.epsilon(4, "record") + 1e-3
    team = make_team(tmp_path / "team", "pe-vdn-d", epsilon_budget=budget, **limited)
    members = members_of(team)
    ledger = members["bob"].state.ledger
    settle, left = ledger.settle, [4]

    def dies(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed("between reserving and settling")
        settle(*args)

    ledger.settle = dies
    play_until_killed(members)
    with pytest.raises(Stopped, match="the privacy budget of bob is spent"):
        party_of(team, "bob")
    found = Ledger.read(members["bob"].folder, fingerprint(team.config))
    assert (found.exposure, found.lost) == ([4], [1])
    spent, guaranteed = found.spent()[0].epsilon_record, found.guaranteed()[0].epsilon_record
    assert spent == guaranteed and budget - 0.01 < spent <= budget


def test_the_budget_against_teammates_ends_a_team(tmp_path: Path) -> None:
    """Five updates are affordable: two in each of the blocks 2 and 3, and one in block 4."""
    limited: dict[str, Any] = {"steps": 60, "delta": 1e-3}
    unlimited = make_team(tmp_path / "first", "pe-vdn-d", **limited)
    budget = Plan.of(unlimited.config, 2).mechanism.epsilon(5, "record") + 1e-3
    team = make_team(tmp_path / "team", "pe-vdn-d", epsilon_budget=budget, **limited)
    members = members_of(team)
    assert play(members) == {}
    for name in ("alice", "bob"):
        ledger, progress = members[name].state.ledger, members[name].state.progress
        assert ledger.exposure == [5] and progress.exhausted_at == 1
        assert (progress.blocks, progress.episodes, progress.updates) == (4, 8, 5)
        assert 1 < metrics_of(members[name].folder)[-1]["epsilon_record"] < budget


def test_three_unlike_agents_learn_what_the_simulation_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any two of them may collude against the third, or here one; updates are left to coins."""
    world = Coordination(3)
    assert len(set(world.agents)) > 1
    monkeypatch.setattr(worlds, "team_size", lambda env: 3)
    monkeypatch.setattr(worlds, "make", lambda env: world)
    options: dict[str, Any] = {"env": "toy:coordination", "parties": 3, "steps": 60}
    options |= {"colluders": 1, "buffer_throughput": 1.5, "bootstrap_timeouts": False}
    team = make_team(tmp_path / "team", "pe-vdn-d", "pairwise-masks", **options)
    members = members_of(team)
    assert play(members) == {}
    simulation = Simulation(world, team.config)
    state = jax.jit(simulation.start)(jnp.array([team.config.seed]))
    state = jax.jit(simulation.advance)(state, jnp.int32(60), jnp.int32(10**6))
    progress = members["carol"].state.progress
    assert 0 < progress.updates == int(state.updates[0]) < 2 * progress.blocks
    parties = [member for member in members.values() if isinstance(member, Party)]
    assert_near(simulation, state, parties)


def test_parties_with_bodies_of_their_own_need_no_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import own_body

    made = make_team(tmp_path / "made", "pe-vdn-d", steps=40, parallel_episodes=1, eval_episodes=1)
    places = [(party.name, party.address) for party in made.parties]
    team = keys.create(tmp_path / "team", made.config, places, patience=30)
    heights, together = [0, 0], threading.Barrier(2, timeout=30)
    members = {
        name: party_of(team, name, own_body.Carrier(end, heights, together))
        for end, name in enumerate(("alice", "bob"))
    }
    assert play(members) == {}
    for member in members.values():
        progress = member.state.progress
        assert progress.blocks == progress.episodes == 10 and progress.updates == 7
