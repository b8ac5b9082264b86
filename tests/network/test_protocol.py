"""What leaves a party: nothing but the schema, nothing it saw; faulty members stop the team."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from network_team import (
    Heard,
    assert_one_sentence,
    is_exactly,
    lie,
    listen,
    make_team,
    members_of,
    params_of,
    party_of,
    play,
)

from pevdn.network import secure_sum
from pevdn.network import wire_pb2 as wire
from pevdn.network.party import Party
from pevdn.network.roster import Roster

BETWEEN_PARTIES = {
    *("hello", "commit", "reveal", "share", "partial_sum", "masked"),
    *("digest", "recall", "outcome", "farewell"),
}
TO_THE_WORLD = {"hello", "ready", "actions", "farewell"}

pytestmark = pytest.mark.usefixtures("shared_programs")


def leaks(heard: Heard) -> list[str]:
    """Everything that left a party and is not what the schema allows, in words."""
    found = []
    for sender, to, data in heard.said:
        if sender == "world":
            continue
        if any(seen in data for seen in heard.observed[sender]):
            found.append(f"{sender} told {to} what it saw")
        receipt, envelope = wire.Receipt(), wire.Envelope()
        if is_exactly(receipt, data) and receipt.status:
            continue
        if not is_exactly(envelope, data):
            found.append(f"{sender} told {to} what is not in the schema")
            continue
        kind = envelope.WhichOneof("body")
        if envelope.sender != sender or envelope.run != heard.team.run:
            found.append(f"{sender} told {to} something as somebody else")
        if kind not in (TO_THE_WORLD if to == "world" else BETWEEN_PARTIES):
            found.append(f"{sender} told {to} a {kind}")
        if kind in ("share", "partial_sum", "masked"):
            words = np.frombuffer(getattr(envelope, kind).words, "<u4")
            padded = heard.members[sender].protocol._pad(heard.words[envelope.step][sender])
            if len(words) != len(padded):
                found.append(f"{sender} told {to} a {kind} of another length")
            if np.isin(words, padded).sum() > 0.1 * len(words):
                found.append(f"{sender} told {to} its own messages")
    return found


def test_all_that_leaves_a_party_is_of_the_schema_and_nothing_that_it_saw(heard: Heard) -> None:
    assert leaks(heard) == []
    kinds: set[tuple[str, str]] = set()
    for sender, to, data in heard.said:
        envelope = wire.Envelope()
        if sender != "world" and is_exactly(envelope, data):
            kinds.add((to if to == "world" else "peer", str(envelope.WhichOneof("body"))))
    vector = {"masked"} if heard.team.mode == "pairwise-masks" else {"share", "partial_sum"}
    seed = set() if heard.team.config.noised else {"commit", "reveal"}
    always = {"hello", "digest", "farewell"}
    assert {kind for to, kind in kinds if to == "peer"} == always | seed | vector
    assert {kind for to, kind in kinds if to == "world"} == TO_THE_WORLD


def test_with_noise_the_size_of_what_is_sent_does_not_tell_the_sample(heard: Heard) -> None:
    """Without noise as many words are sent as steps were played in the minibatch.

    An opening has a word for every step of one block, and later of two: lengths are public.
    """
    sizes = set()
    for sender, _, data in heard.said:
        envelope = wire.Envelope()
        if sender != "world" and is_exactly(envelope, data):
            body = getattr(envelope, str(envelope.WhichOneof("body")))
            sizes |= {len(body.words) // 4} if hasattr(body, "words") else set()
    batch, steps = heard.team.config.settings.expected_batch_size, 2
    most = math.ceil(batch + 4 * math.sqrt(batch)) * steps  # exceeded once in thousands of steps
    wanted = {most if heard.team.config.private else batch * steps}
    block = heard.team.config.block_size * steps
    assert sizes == ({block, 2 * block} if heard.team.config.noised else wanted)


def test_what_a_peer_is_sent_looks_uniform(heard: Heard) -> None:
    """Bits of the shares, or masked words, that alice sent: as many ones as zeros, everywhere."""
    kind = "masked" if heard.team.mode == "pairwise-masks" else "share"
    sent = {}
    for sender, to, data in heard.said:
        envelope = wire.Envelope()
        ours = sender == "alice" and to == "bob" and is_exactly(envelope, data)
        if ours and envelope.WhichOneof("body") == kind:
            sent[envelope.step] = getattr(envelope, kind).words
    bits = np.unpackbits(np.frombuffer(b"".join(sent.values()), np.uint8).reshape(-1, 4), axis=1)
    assert heard.team.config.settings.modulus == 2**32
    deviation = 0.5 / np.sqrt(len(bits))
    assert len(bits) > (300 if heard.team.config.noised else 500)
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 5 * deviation)


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
        if not envelope.HasField("commit"):
            return None
        seen = next(iter(heard.observed["alice"]))
        return envelope.SerializeToString() + b"\xfa\x07" + bytes([len(seen)]) + seen  # field 127

    lie(members["alice"], planted)
    said = play(members)
    assert set(leaks(heard)) == {
        "alice told bob what it saw",
        "alice told bob what is not in the schema",
    }
    assert "bob refused a message of alice in step 2: unknown or repeated fields." in said["alice"]


def test_a_party_that_sends_its_own_messages_bare_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_sum, "split", lambda words, n, *_: np.stack([0 * words, words]))
    team = make_team(tmp_path / "team", steps=16)
    members = members_of(team)
    heard = listen(members, team)
    play(members)
    assert set(leaks(heard)) == {
        "alice told bob its own messages",
        "bob told alice its own messages",
    }


# --- faulty members ---------------------------------------------------------------------------


def to_the_end(members: dict[str, Any]) -> dict[str, list[list[np.ndarray]]]:
    """Parameters of every party after every step, as they come."""
    history: dict[str, list[list[np.ndarray]]] = {}
    for name, member in members.items():
        if isinstance(member, Party):
            steps = history[name] = [params_of(member)]

            def apply(
                outcome: Any,
                messages: Any = None,
                real: Any = member.state.apply,
                m: Any = member,
                steps: Any = steps,
            ) -> None:
                real(outcome, messages)
                steps.append(params_of(m))

            member.state.apply = apply  # type: ignore[method-assign]
    return history


def assert_stopped_in(
    team: Roster, members: dict[str, Any], history: Any, said: dict[str, str], what: str
) -> None:
    """All stopped, for the same reason, and no party learnt from the step that went wrong."""
    assert set(said) == set(members)
    for text in said.values():
        assert_one_sentence(text)
        assert what in text, text
    least = min(m.state.progress.step for m in members.values() if isinstance(m, Party))
    for name, steps in history.items():
        assert all(map(np.array_equal, params_of(members[name]), steps[least]))
        again = party_of(team, name)
        assert again.state.progress == members[name].state.progress
        assert all(map(np.array_equal, params_of(again), steps[least]))


def reveals_another_nonce(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("reveal") and envelope.step > 2:
        envelope.reveal.nonce = bytes(32)


def tells_carol_another_sum(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("partial_sum") and to == "carol":
        envelope.partial_sum.words = bytes(4) + envelope.partial_sum.words[4:]


def masks_carols_otherwise(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("masked") and to == "carol":
        envelope.masked.words = bytes(4) + envelope.masked.words[4:]


def pays_alice_more(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("observation") and to == "alice" and envelope.step > 2:
        rewards = np.frombuffer(envelope.observation.rewards, "<f4") + np.float32(1)
        envelope.observation.rewards = rewards.tobytes()


def pays_alice_more_when_it_counts(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("observation") and to == "alice" and envelope.step == 1:  # an evaluation
        rewards = np.frombuffer(envelope.observation.rewards, "<f4") + np.float32(1)
        envelope.observation.rewards = rewards.tobytes()


def shares_too_little(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("share"):
        envelope.share.words = envelope.share.words[:-4]


def shows_too_little(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("observation") and to == "alice":
        envelope.observation.observations = envelope.observation.observations[:-4]


def chooses_what_is_not_there(to: str, envelope: wire.Envelope) -> None:
    if envelope.HasField("actions") and envelope.step > 2:
        envelope.actions.actions = b"\xff\xff" * (len(envelope.actions.actions) // 2)


LIES = [
    ("bob", reveals_another_nonce, "shares", "bob revealed a nonce in step"),
    ("bob", tells_carol_another_sum, "shares", "have different sums in step"),
    ("bob", masks_carols_otherwise, "pairwise-masks", "have different sums in step"),
    ("world", pays_alice_more, "shares", "received different rewards, lengths or ends"),
    ("world", pays_alice_more_when_it_counts, "shares", "have different scores in step 1"),
    ("bob", shares_too_little, "shares", "bob sent "),
    ("world", shows_too_little, "shares", "the world sent time step 0 of step 1 in another shape"),
    (
        "bob",
        chooses_what_is_not_there,
        "shares",
        "bob sent 2 actions of at most 65535, but",
    ),
]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("algorithm", "who", "change", "mode", "what"),
    [*(("pe-vdn-b", *lie) for lie in LIES), *(("pe-vdn-d", *LIES[i]) for i in (1, 3))],
)
def test_a_faulty_member_stops_the_team_before_any_update(
    algorithm: str, who: str, change: Any, mode: str, what: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"env": "toy:coordination", "parties": 3, "steps": 60, "patience": 10}
    team = make_team(tmp_path / "team", algorithm, mode, **options)
    members = members_of(team)
    history = to_the_end(members)
    lie(members[who], change)
    said = play(members)
    assert_stopped_in(team, members, history, said, what)


def test_with_dp_a_message_that_does_not_fit_stops_no_party(tmp_path: Path) -> None:
    team = make_team(
        tmp_path / "team", "pe-vdn-c", env="toy:coordination", steps=60, precision=7, modulus=2**20
    )
    members = members_of(team)
    assert play(members) == {}
    assert members["bob"].state.progress.updates > 0


def test_a_message_that_does_not_fit_stops_the_team(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=40, patience=10)
    members = members_of(team)
    bob = members["bob"]
    bob.state.learner = jax.tree.map(lambda x: x * np.asarray(1e9, x.dtype), bob.state.learner)
    history = to_the_end(members)
    said = play(members)
    assert_stopped_in(team, members, history, said, "a message of bob does not fit into ±")
