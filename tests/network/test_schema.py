"""Messages that do not match the schema are refused; all others get through."""

import asyncio
import random
from typing import Any

from network_wire import (
    RUN,
    VIEW,
    Inbox,
    call,
    hello,
    member,
    running,
    share,
    team,
    within,
)

from pevdn.network import transport
from pevdn.network import wire_pb2 as wire
from pevdn.network.wire_pb2 import Envelope, Receipt

grpc = transport.grpc  # imported there, after TLS 1.2 is switched off


def wrong() -> dict[str, tuple[bytes, str]]:
    """Messages of alice's that are not to the schema, and a word of why they are refused."""
    late = share().SerializeToString()
    inner = share()
    inner.share.words = b""
    unknown = b"\xfa\x3f\x01x"  # field 1023
    nested = inner.SerializeToString().replace(b"\xb2\x01\x00", b"\xb2\x01\x04" + unknown)
    assert nested.endswith(unknown)

    def body(**said: Any) -> bytes:
        return Envelope(run=RUN, view=VIEW, step=1, sender="alice", **said).SerializeToString()

    def greeting(**changed: Any) -> bytes:
        return hello(**changed).SerializeToString()

    seen_off = hello()
    seen_off.view = VIEW
    return {
        "another run": (share(run=bytes(32)).SerializeToString(), "run"),
        "no run": (share(run=b"").SerializeToString(), "run"),
        "unknown field": (late + unknown, "unknown"),
        "unknown field inside": (nested, "unknown"),
        "field said twice": (late + late, "repeated"),
        "no body": (body(), "body"),
        "empty": (b"", "sender"),
        "not protobuf": (b"\xff" * 20, "envelope"),
        "not UTF-8": (late.replace(b"alice", b"ali\xffe"), "envelope"),
        "short view": (share(view=VIEW[1:]).SerializeToString(), "view"),
        "no view": (share(view=b"").SerializeToString(), "view"),
        "view in a hello": (seen_off.SerializeToString(), "view"),
        "long run in a hello": (greeting().replace(RUN, RUN + b"x").replace(b"\n ", b"\n!"), "run"),
        "incarnation": (greeting(incarnation=b"1"), "hello.incarnation"),
        "one of the incarnations": (
            greeting(names=["alice", "bob"], incarnations=[VIEW, b""]),
            "hello.incarnations",
        ),
        "names without incarnations": (greeting(names=["alice", "bob"]), "hello.incarnations"),
        "mask key": (greeting(mask_key=bytes(31)), "hello.mask_key"),
        "commitment": (
            body(commit=wire.Commit(commitment=bytes(31), facts=bytes(32))),
            "commit.commitment",
        ),
        "facts": (body(commit=wire.Commit(commitment=bytes(32))), "commit.facts"),
        "nonce": (body(reveal=wire.Reveal(nonce=bytes(33))), "reveal.nonce"),
        "digest": (body(digest=wire.Digest(digest=b"x")), "digest.digest"),
        "words": (share(b"12345").SerializeToString(), "share.words"),
        "partial words": (body(partial_sum=wire.PartialSum(words=b"1")), "partial_sum.words"),
        "masked words": (body(masked=wire.Masked(words=b"12")), "masked.words"),
        "plain words": (body(plain=wire.Plain(words=b"123")), "plain.words"),
        "outcome words": (body(outcome=wire.Outcome(words=b"1")), "outcome.words"),
        "outcome nonces": (
            body(outcome=wire.Outcome(names=["bob"], nonces=[b"1"])),
            "outcome.nonces",
        ),
        "observations": (
            body(observation=wire.Observation(observations=b"1")),
            "observation.observations",
        ),
        "rewards": (body(observation=wire.Observation(rewards=b"1")), "observation.rewards"),
        "actions": (body(actions=wire.Actions(actions=b"1")), "actions.actions"),
    }


def test_what_is_not_to_the_schema_is_refused_and_counted_by_reason() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            for name, (data, why) in wrong().items():
                receipt = Receipt.FromString(await call(roster["bob"], data, roster["alice"]))
                assert receipt.status == wire.REFUSED, name
                assert why in receipt.reason, name
            assert inbox.seen == []
            assert sum(bob.counters.refused.values()) == len(wrong()) == bob.counters.calls
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_every_kind_of_message_gets_through() -> None:
    words, bits = bytes(8), bytes(32)
    said: list[dict[str, Any]] = [
        {"commit": wire.Commit(commitment=bits, facts=bits)},
        {"reveal": wire.Reveal(nonce=bits)},
        {"share": wire.Share(words=words)},
        {"partial_sum": wire.PartialSum(words=words)},
        {"masked": wire.Masked(words=words)},
        {"plain": wire.Plain(words=words)},
        {"digest": wire.Digest(digest=bits)},
        {"recall": wire.Recall()},
        {"outcome": wire.Outcome(words=words, names=["bob"], nonces=[bits])},
        {"ready": wire.Ready(purpose=wire.TRAIN, number=3)},
        {
            "observation": wire.Observation(
                t=1, observations=words, available=b"1", rewards=words, flags=b"1"
            )
        },
        {"actions": wire.Actions(t=1, actions=words)},
        {"farewell": wire.Farewell(reason="done")},
    ]
    envelopes = [Envelope(run=RUN, view=VIEW, step=1, sender="alice", **body) for body in said]
    stranger = hello(mask_key=bits)
    stranger.run = bytes(32)  # of another agreement: compared in words, by whoever receives it
    envelopes += [hello(), stranger]
    assert {envelope.WhichOneof("body") for envelope in envelopes} == {
        field.name for field in Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    }

    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            for envelope in envelopes:
                receipt = await alice.send("bob", envelope, until=within(10))
                assert receipt == Receipt(status=wire.ACCEPTED), envelope
        assert inbox.seen == envelopes

    asyncio.run(story())


def test_whatever_a_member_sends_the_server_answers_and_goes_on() -> None:
    chance = random.Random(2)
    good = [share(chance.randbytes(400)), hello(agreement="{}", version="1")]
    good.append(Envelope(run=RUN, view=VIEW, step=2, sender="alice", recall=wire.Recall()))

    def mutated() -> bytes:
        data = bytearray(chance.choice(good).SerializeToString())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at:at] = chance.randbytes(chance.randint(1, 20))
                case 2:
                    del data[at : at + chance.randint(1, 20)]
                case 3:
                    data[at:] = data[: chance.randrange(len(data))]
            data = data or bytearray(1)
        return bytes(data)

    cases = [chance.randbytes(chance.randrange(500)) for _ in range(150)]
    cases += [mutated() for _ in range(350)]

    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            deliver = alice._calls["bob"]
            for data in cases:
                receipt = Receipt.FromString(await deliver(data, timeout=10))
                assert receipt.status in (wire.ACCEPTED, wire.REFUSED)
            for envelope in inbox.seen:
                assert envelope.sender == "alice" and len(envelope.run) == 32
                assert envelope.run == RUN or envelope.HasField("hello")
            assert sum(bob.counters.answered.values()) == len(cases)
            assert len(bob.counters.refused) >= 4
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())
