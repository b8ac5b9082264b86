"""One agent, in a process of its own: Algorithm 1 as rounds that the whole team completes or none.

    play       RUN a block of episodes, APPEND them, and make a seed together (commit, reveal)
    update     CHOOSE indices, COMPUTE m_i, form Σ m_i, and learn
    evaluate   play greedily; nothing is kept but the score

A round ends with a line in the journal. Everything that follows from that line is computed by the
agent alone and the same every time (`_apply`), while training as well as after a kill.

What leaves this process is in wire.proto, and nothing else: shares of m_i, sums of shares, digests
of sums, its part of the seed, and, to the world alone, its actions.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from pevdn import worlds
from pevdn.agent import acting, learning
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode
from pevdn.config import experiment as configuration
from pevdn.config.experiment import fingerprint
from pevdn.config.settings import MOST
from pevdn.errors import PevdnError, UsageError
from pevdn.network import course as courses
from pevdn.network import readme
from pevdn.network import secure_sum as sums
from pevdn.network import wire_pb2 as wire
from pevdn.network.course import END, EVALUATE, PLAY, UPDATE, Course
from pevdn.network.environment import BY_THE_CLOCK, ENDED, GOING, WON, Body, OwnBody, RemoteWorld
from pevdn.network.group import DONE, Group, Left, Stopped, ViewChanged
from pevdn.network.mind import Mind, Thought
from pevdn.network.randomness import Draws, Own, Rehearsal
from pevdn.network.recovery import Journal, Record
from pevdn.network.roster import Roster
from pevdn.network.status import Status
from pevdn.network.streams import Secret, commitment, fresh, joint_seed
from pevdn.privacy import accounting, randomness
from pevdn.privacy.ledger import Ledger, digest
from pevdn.privacy.planner import Plan, affordable
from pevdn.storage.files import make_private, whole_lines, write_atomically
from pevdn.storage.strict_json import to_json

SNAPSHOT = 200  # rounds from one snapshot to the next
Result = TypeVar("Result")


class Party:
    """One agent of the team."""

    def __init__(
        self,
        roster: Roster,
        me: str,
        key: bytes,
        folder: Path,
        body: Body | None = None,
        listen: str | None = None,
    ) -> None:
        self.roster, self.me, self.folder, self.config = roster, me, folder, roster.config
        if self.config.exchange == "central":
            raise UsageError(
                f"{self.config.algorithm} has a central node that sees everything, so there is "
                "nothing to run on several machines; train it with `pevdn train`."
            )
        self.index, self.agents = roster.index(me), len(roster.parties)
        self.names = [party.name for party in roster.parties]
        self.peers = [name for name in self.names if name != me]
        if body is None:
            if roster.world is None:
                raise UsageError(
                    f"{roster.path} has no [world], so {me} needs a body of its own; start it from "
                    "Python, as in examples/own_body.py."
                )
            world = worlds.make(self.config.env)
            spec, max_steps = world.agents[self.index], world.max_steps
        else:
            _check_one_at_a_time(self.config)
            spec, max_steps = body.spec, body.max_steps
        self.max_steps = max_steps
        make_private(folder)
        write_atomically(folder / "config.yaml", configuration.to_text(self.config))
        readme.leave(folder, self.config, roster.rehearsal)
        self.secret = Secret.load_or_create(folder / "secret")
        self.draws: Draws = (
            Rehearsal(self.config.seed) if roster.rehearsal else Own(self.secret, roster.run)
        )
        self.mind = Mind(self.config, spec, self.agents, max_steps)
        mask_key = self.secret.mask_key().public_key().public_bytes_raw()
        self.group = Group(roster, me, key, lambda: self.course.round, mask_key, listen, folder)
        self.group.on_recall = self._recalled
        self.group.ended = lambda: self._ended
        self.stage = OwnBody(body) if body is not None else RemoteWorld(self.group, spec)
        self.status = Status(folder, self.group)
        self.journal = Journal(folder)
        self.course = Course(threshold=self.config.settings.anchor_threshold)
        self.last: Record | None = None
        self.parted = False  # all others are at the end as well, and need nothing any more
        self.ledger: Ledger | None = None
        self.learner = self.mind.begin(self.draws.first(self.index, self.agents))
        self.replay = PackedReplay(self.config.settings.buffer_size)
        self._affordable = affordable(self.config, self.agents)
        self._recovered = False
        self._recover()
        self._recovered = True

    # ---- the team's rounds --------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the course is at its end; a member that starts anew is waited for."""
        if self.parted or (self._ended and self.group.all_done(self.group.others)):
            self.status.state = "finished"
            self.status.write()
            return
        await self.group.start()
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                try:
                    self.status.state = "looking for the others"
                    await self._catch_up(await self.group.agree())
                    self.masks = self._agreed_masks()
                    self.status.event("agreed", round=self.course.round)
                    self.status.state = "training"
                    await self._rounds()
                    self._save()
                    self.status.state = "finished"
                    self.parted = await self.group.part(self.group.others)
                    self._save()
                    break
                except ViewChanged:
                    self.status.event("a member started anew", round=self.course.round)
        except Exception as problem:
            self._save()
            if isinstance(problem, Stopped) and self._ended:
                self.status.state = "finished"  # the others are gone, and nothing is left to do
                await self.group.say_farewell(DONE, 5.0)
                return
            self.status.state = "stopped"
            self.status.event("stopped", reason=str(problem) or type(problem).__name__)
            if isinstance(problem, PevdnError) and not isinstance(problem, Left):
                await self.group.say_farewell(str(problem), 5.0)
            raise
        finally:
            beat.cancel()
            self.status.write()
            await self.group.stop()

    @property
    def _ended(self) -> bool:
        return courses.next_kind(self.course, self.config) == END

    async def _rounds(self) -> None:
        attempts: dict[str, Callable[[], Any]] = {
            PLAY: self._play,
            UPDATE: self._update,
            EVALUATE: self._evaluate,
        }
        while (kind := self._next()) in attempts:
            record, thought = await attempts[kind]()
            await self._complete(record, thought)

    async def _complete(self, record: Record, thought: Thought | None = None) -> None:
        """The round is over: first on disk, then in the mind."""
        self.journal.append(record)
        await self._compute(self._apply, record, thought)
        self.status.rounds[record.kind] += 1
        self.group.forget(self.course.round)
        if self.course.round % SNAPSHOT == 0:
            self._save()

    async def _catch_up(self, completed: dict[str, int]) -> None:
        """One that missed the end of a round is told by all others what came out of it."""
        there = max(completed[name] for name in self.names)
        if there > self.course.round + 1:
            ahead = next(name for name in self.names if completed[name] == there)
            raise PevdnError(
                f"{ahead} has completed round {there} and {self.me} only {self.course.round}: "
                f"{self.folder} is not what {self.me} had on disk; restore it, or start the whole "
                "team anew."
            )
        if there == self.course.round:
            return
        self._next()  # what was not due is passed over by everybody
        who = [name for name in self.peers if completed[name] == there]
        await self.group.tell(who, there, recall=wire.Recall())
        heard = await self.group.hear(who, there, "recalled")
        told = {body.SerializeToString(deterministic=True) for body in heard.values()}
        if len(told) > 1:
            raise PevdnError(
                f"{' and '.join(who)} tell different things about round {there}; one of them lies, "
                "or has lost its files."
            )
        body = heard[who[0]]
        nonces = dict(zip(body.names, body.nonces, strict=True))
        words = np.frombuffer(body.words, "<u4").astype(np.uint32)
        record = Record(there, body.kind, words, nonces)
        thought = await self._compute(self._think) if body.kind == UPDATE else None
        if not self._likely(record, thought):
            raise PevdnError(
                f"{' and '.join(who)} told {self.me} of an end of round {there} that it cannot "
                "have had; one of them lies, or has lost its files."
            )
        self.status.event("caught up", round=there)
        await self._complete(record, thought)

    def _likely(self, record: Record, thought: Thought | None) -> bool:
        """Whether a round that this party has missed the end of can have ended so."""
        if record.kind != self._next():
            return False
        if record.kind == PLAY:
            own = record.nonces.get(self.me)
            return set(record.nonces) == set(self.names) and own == self._nonce(record.round)
        if thought is None:
            return len(record.words) == 3
        alone = self.config.exchange == "alone"
        return len(record.words) == (0 if alone else len(thought.words))

    def _recalled(self, round: int) -> wire.Recalled | None:
        if self.last is None or self.last.round != round:
            return None
        names = sorted(self.last.nonces)
        return wire.Recalled(
            kind=self.last.kind,
            words=sums.to_bytes(self.last.words),
            names=names,
            nonces=[self.last.nonces[name] for name in names],
        )

    def _next(self) -> str:
        """The kind of the next round; updates that are not due are passed over."""
        while (kind := courses.next_kind(self.course, self.config)) == UPDATE:
            if self._due():
                break
        return kind

    def _due(self) -> bool:
        """Whether the next update is made; else it is passed over, by everybody alike."""
        course, s = self.course, self.config.settings
        coin = 0.0
        if s.buffer_throughput > 1:
            coin = self.draws.coin(*self._of_block())
        ready = course.episodes >= self.config.learning_starts and coin * s.buffer_throughput < 1
        if ready and self._affordable is not None:
            if courses.exposed(course, self.config) >= self._affordable:
                self.course = replace(course, exhausted_at=course.evaluations)
                return False
            lost = self.ledger.lost[0] if self.ledger is not None else 0
            if self._recovered and courses.exposed(course, self.config) >= self._affordable - lost:
                raise Stopped(
                    f"the privacy budget of {self.me} is spent: updates that it may have lost in a "
                    "crash count as well."
                )
        if not ready:
            self.course = replace(course, looked_at=course.looked_at + 1)
        return ready

    def _of_block(self) -> tuple[bytes, int, int, int]:
        """Seed and number of the block, number of the update in it, and how many are due."""
        course = self.course
        due = courses.updates_due(self.config)
        return bytes.fromhex(course.seed), course.blocks - 1, course.looked_at, due

    # ---- play ---------------------------------------------------------------------------------

    async def _play(self) -> tuple[Record, None]:
        """RUN a block of episodes, APPEND them to the disk, and make the seed of its minibatches.

        The seed is made after the episodes, so that nobody can know at the time which of them
        will be learnt from; each commits to its part before it hears the others'.
        """
        round, block = self.course.round + 1, self.course.blocks
        rows, facts = await self._episodes(round, block)
        self.journal.keep(block, rows)
        run, nonce = self.roster.run, self._nonce(round)
        own = wire.Stored(commitment=commitment(nonce, self.me, run, round), facts=facts)
        stored = await self.group.swap(self.peers, round, "stored", stored=own)
        others = sorted(name for name, body in stored.items() if body.facts != facts)
        if others:
            raise PevdnError(
                f"{self.me} and {' and '.join(others)} were told different rewards, lengths or "
                f"ends of the episodes of round {round}; the world, or one of them, lies."
            )
        reveal = wire.Reveal(nonce=nonce)
        revealed = await self.group.swap(self.peers, round, "reveal", reveal=reveal)
        nonces = {self.me: nonce, **{name: body.nonce for name, body in revealed.items()}}
        for name, body in stored.items():
            if commitment(nonces[name], name, run, round) != body.commitment:
                raise PevdnError(
                    f"{name} revealed another part of the seed in round {round} than it had "
                    "committed to; it lies."
                )
        return Record(round, PLAY, np.frombuffer(facts, "<u4").astype(np.uint32), nonces), None

    def _nonce(self, round: int) -> bytes:
        """The same for a round, however often it is tried."""
        return self.secret.stream("nonce", self.roster.run, round).bytes(32)

    async def _episodes(self, round: int, block: int) -> tuple[PackedReplay, bytes]:
        """A block of own episodes, and a digest of what is public about them."""
        s, E, T = self.config.settings, courses.block_size(self.config), self.max_steps
        epsilon = acting.exploration(
            np.float32(self.course.env_steps),  # type: ignore[arg-type]
            s.exploration_start,
            s.exploration_end,
            s.exploration_steps,
        )
        spec = self.mind.spec
        blank: Any = np.zeros  # an Episode of numpy's arrays, to be written to
        tape = Episode(
            observations=blank((E, T + 1, spec.observation_size), np.float32),
            available=blank((E, T + 1, spec.n_actions), bool),
            actions=blank((E, T), np.int16),
            rewards=blank((E, T), np.float32),
            terminal=blank((E, T), bool),
            length=blank(E, np.int32),
        )
        paid = np.zeros((E, T), np.float32)
        params = self.learner.params
        async for step, actions, before, after in self._steps(
            round, wire.TRAIN, E, block, params, float(epsilon)
        ):
            if step == 0:
                tape.observations[:, 0], tape.available[:, 0] = (
                    before.observations,
                    before.available,
                )
            on = (after.flags & GOING) > 0
            tape.observations[:, step + 1] = after.observations * on[:, None]
            tape.available[:, step + 1] = after.available & on[:, None]
            tape.actions[:, step] = actions * on
            paid[:, step] = after.rewards * on
            ended = (after.flags & ENDED > 0) & (after.flags & BY_THE_CLOCK == 0)
            tape.terminal[:, step] = ended & on
            tape.length[:] += on
        tape.rewards[:] = np.asarray(learning.kept_reward(paid, s.reward_cap))  # type: ignore[arg-type]
        rows = PackedReplay(E)
        for e in range(E):
            rows.store(e, Episode(*(x[e] for x in tape)))
        facts = hashlib.sha256(tape.length.tobytes() + paid.tobytes() + tape.terminal.tobytes())
        return rows, facts.digest()

    async def _steps(
        self, round: int, purpose: int, episodes: int, number: int, params: Any, epsilon: float
    ) -> Any:
        """Play to the end; yields (step, actions, seen before, seen after)."""
        with self.status.spending("playing"):
            seen = await self.stage.begin(round, purpose, episodes, number)
            memory, last = self.mind.memory(params, episodes), np.full(episodes, -1, np.int32)
            for step in range(self.max_steps):
                chance = np.zeros((episodes, 2), np.float32)
                if purpose == wire.TRAIN:
                    chance = self.draws.chance(number, step, self.index, self.agents, episodes)
                memory, actions = self.mind.act(
                    params, memory, seen.observations, seen.available, last, chance, epsilon
                )
                after = await self.stage.act(round, step, actions)
                yield step, actions, seen, after
                if after.over:
                    return
                seen, last = after, actions

    # ---- update -------------------------------------------------------------------------------

    async def _update(self) -> tuple[Record, Thought]:
        """CHOOSE indices, COMPUTE m_i, and form the sum."""
        round = self.course.round + 1
        thought = await self._compute(self._think)
        if not thought.fits:  # never with DP: there messages saturate
            s, limit = self.config.settings, self.mind.code.limit(self.agents)
            raise PevdnError(
                f"a message of {self.me} does not fit into ±{limit:g}, the range that "
                f"precision={s.precision} and modulus={s.modulus} leave to {self.agents} agents; "
                "the update was not made. Lower precision or learning_rate, or raise modulus."
            )
        total = await self._sum(round, self._padded(thought.words))
        return Record(round, UPDATE, total[: len(thought.words)]), thought

    def _padded(self, words: np.ndarray) -> np.ndarray:
        """If private, as many words in (nearly) every round: their number would tell of the sample.

        An outsider who counts bytes must not learn which episodes were drawn.
        """
        if not self.config.private:
            return words
        expected = self.config.settings.expected_batch_size
        room = math.ceil(expected + 4 * math.sqrt(expected)) * self.max_steps
        size = room * max(1, -(-len(words) // room))
        return np.concatenate([words, np.zeros(size - len(words), np.uint32)])

    def _think(self) -> Thought:
        return self.mind.think(self.learner, self.replay, self._chosen())

    def _chosen(self) -> np.ndarray:
        """The slots of the minibatch: every party draws the same."""
        s, course = self.config.settings, self.course
        tickets = self.draws.tickets(*self._of_block(), s.buffer_size)
        filled = min(course.episodes, s.buffer_size)
        if self.config.sampling == "uniform":
            slots = sums.choose_uniform(tickets, filled, s.expected_batch_size)
        else:
            slots = sums.choose_poisson(tickets, filled, self.config.sampling_rate)
        return sums.longest_first(slots, self.replay.length)

    async def _sum(self, round: int, words: np.ndarray) -> np.ndarray:
        """Σ over all parties of their words, as the algorithm forms it; the same for everybody."""
        if self.config.exchange == "alone":  # nothing is said but that the round is over
            await self._compare(round, words[:0])
            return words[:0]
        p = self.config.settings.modulus
        if self.config.exchange == "broadcast":
            total = await self._add_up(round, "plain", wire.Plain, words)
        elif self.roster.mode == "pairwise-masks":
            mask = self.masks.mask(len(words), p, round, self.group.view)
            total = await self._add_up(round, "masked", wire.Masked, sums.add(words, mask, p))
        else:
            mine, *shares = sums.split(words, self.agents, p, fresh())
            bodies = {
                name: {"share": wire.Share(words=sums.to_bytes(share))}
                for name, share in zip(self.peers, shares, strict=True)
            }
            with self.status.spending("talking"):
                await self.group.tell_each(bodies, round)
            with self.status.spending("waiting"):
                held = await self.group.hear(self.peers, round, "share")
            own = sums.add_up([mine, *self._words(held, len(words))], p)
            total = await self._add_up(round, "partial_sum", wire.PartialSum, own, "talking")
        await self._compare(round, total)
        return total

    async def _add_up(
        self, round: int, kind: str, form: Any, own: np.ndarray, hearing: str = "waiting"
    ) -> np.ndarray:
        """Tell every party a vector, and add up everybody's.

        What is heard first in a round comes from parties that may still compute: that is waiting.
        """
        with self.status.spending("talking"):
            body = {kind: form(words=sums.to_bytes(own))}
            await self.group.tell(self.peers, round, **body)
        with self.status.spending(hearing):
            heard = await self.group.hear(self.peers, round, kind)
        vectors = [own, *self._words(heard, len(own))]
        return sums.add_up(vectors, self.config.settings.modulus)

    def _words(self, heard: dict[str, Any], length: int) -> list[np.ndarray]:
        vectors, p = [], self.config.settings.modulus
        for name, body in heard.items():
            try:
                vectors.append(sums.from_bytes(body.words, length))
            except PevdnError:
                raise PevdnError(
                    f"{name} sent {len(body.words)} bytes where {length} numbers of four were "
                    "expected; it lies, or has other episodes."
                ) from None
            if np.any(vectors[-1] > p - 1):
                raise PevdnError(f"{name} sent numbers that are not below modulus={p}; it lies.")
        return vectors

    async def _compare(self, round: int, total: np.ndarray, what: str = "sums") -> None:
        """Who tells different peers different things is noticed here, before anybody learns."""
        own = wire.SumDigest(digest=sums.digest(total))
        with self.status.spending("talking"):
            heard = await self.group.swap(self.peers, round, "sum_digest", sum_digest=own)
        others = sorted(name for name, body in heard.items() if body.digest != own.digest)
        if others:
            raise PevdnError(
                f"{self.me} and {' and '.join(others)} have different {what} in round {round}: "
                "somebody told different peers different things, and nobody has learnt from it."
            )

    def _agreed_masks(self) -> sums.Masks:
        """One for a view: a mask is never used twice."""
        public = {name: self.group.heard[name].mask_key for name in self.peers}
        return sums.Masks(self.me, self.secret.mask_key(), public, self.roster.run)

    # ---- evaluate -----------------------------------------------------------------------------

    async def _evaluate(self) -> tuple[Record, None]:
        """Greedy episodes with one of the models; the score is public."""
        course, E = self.course, self.config.settings.eval_episodes
        model = courses.models(self.config, course.anchored)[course.scored]
        salt = ("params", "anchor", "average").index(model)
        total, won, length = np.zeros(E, np.float32), np.zeros(E, bool), np.zeros(E, np.int32)
        async for *_, after in self._steps(
            course.round + 1,
            wire.EVALUATE,
            E,
            3 * course.evaluations + salt,
            getattr(self.learner, model),
            0.0,
        ):
            on = (after.flags & GOING) > 0
            total += after.rewards * on
            won |= (after.flags & WON > 0) & on
            length += on
        score = np.array([won.mean(), total.mean(), length.mean()], np.float32).view(np.uint32)
        await self._compare(course.round + 1, score, "scores")
        return Record(course.round + 1, EVALUATE, score), None

    # ---- what follows from a round ------------------------------------------------------------

    def _apply(self, record: Record, thought: Thought | None = None) -> None:
        """Learn, count and remember; the same every time it is done for the same record."""
        if record.kind == PLAY:
            self._take_in(record)
        elif record.kind == UPDATE:
            thought = thought or self._think()
            alone = self.config.exchange == "alone"
            self._learn(thought.words if alone else record.words, thought)
        else:
            self._score(*map(float, record.words.view(np.float32)))
        self.last = record
        self._tell()

    def _take_in(self, record: Record) -> None:
        played = self._put_in(self.course.blocks)
        self.course = courses.with_block(self.course, self.config, played, self._seed(record))

    def _seed(self, record: Record) -> bytes:
        """Of everybody's part, and of what was played: a block that is played anew has another."""
        joint = joint_seed(record.nonces, self.roster.run, record.round)
        return hashlib.sha256(joint + sums.to_bytes(record.words)).digest()

    def _put_in(self, block: int) -> int:
        """A block of own episodes, from the disk into the buffer; returns the steps in it."""
        rows = self.journal.kept(block)
        if rows is None:
            raise PevdnError(
                f"the episodes of block {block} are not in {self.folder}, and nobody else has "
                "them; restore the directory, or start the whole team anew."
            )
        size, block_size = self.config.settings.buffer_size, courses.block_size(self.config)
        for e in range(block_size):
            slot = (block * block_size + e) % size
            self.replay.rows[slot], self.replay.length[slot] = rows.rows[e], rows.length[e]
        return int(rows.length.sum())

    def _learn(self, total: np.ndarray, thought: Thought) -> None:
        """From the opened sum to new parameters; if private, in the ledger before and after."""
        course, s = self.course, self.config.settings
        summed = self.mind.gradient(self.learner, thought, total)
        chunk, ledger = None, self.ledger
        if ledger is not None:
            chunk = ledger.reserve(course.round + 1, 1, [MOST], 1)
        where = (course.round + 1, *self._of_block()[1:], self.index, self.agents)
        released = self.mind.release(summed, partial(self.draws.noise, *where))
        pull = s.anchor_penalty if course.anchored else 0.0
        learner = self.mind.improve(self.learner, released, course.updates, course.env_steps, pull)
        made = course.moved(updates=course.updates + 1, looked_at=course.looked_at + 1)
        exposure = max(course.exposure, courses.exposed(made, self.config))
        if ledger is not None and chunk is not None:
            if chunk.digest not in ("", result := digest(jax.tree.leaves(learner.params))):
                raise PevdnError(
                    f"round {course.round + 1} came out differently when {self.me} computed it "
                    "again, so that the same noise would hide two different gradients; go on on "
                    "the machine where it was made, or start the whole team anew."
                )
            ledger.settle(chunk, [1], [exposure], result)
        self.learner = learner
        self.course = replace(made, exposure=exposure)

    def _score(self, win_rate: float, total: float, length: float) -> None:
        course, s = self.course, self.config.settings
        changes: dict[str, Any] = {}
        candidate = "average" if s.average_decay else "params"
        model = courses.models(self.config, course.anchored)[course.scored]
        if s.anchor and model == candidate and win_rate > course.threshold:
            self.learner = self.learner._replace(anchor=self.learner.average)
            changes = {"anchored": True, "threshold": win_rate}
        scores = (*course.scores, (win_rate, total, length))
        models = courses.models(self.config, changes.get("anchored", course.anchored))
        if len(scores) < len(models):
            self.course = course.moved(scored=len(scores), scores=scores, **changes)
            return
        self._write_metrics(dict(zip(models, scores, strict=True)))
        self.course = course.moved(
            scored=0, scores=(), evaluations=course.evaluations + 1, **changes
        )

    def _write_metrics(self, scores: dict[str, tuple[float, float, float]]) -> None:
        course, path = self.course, self.folder / "metrics.jsonl"
        win_rate, total, length = scores.pop("params")
        line: dict[str, Any] = {
            "seed": self.config.seed,
            "env_steps": course.env_steps,
            "episodes": course.episodes,
            "updates": course.updates,
            "win_rate": win_rate,
            "return": total,
            "episode_length": length,
        }
        for model in courses.models(self.config, self.config.settings.anchor)[1:]:
            rate, paid, _ = scores.get(model, (None, None, None))  # no anchor yet
            line |= {f"win_rate_{model}": rate, f"return_{model}": paid}
        if self.ledger is not None:
            line |= self.ledger.spent()[0]._asdict()
        self.status.facts |= line
        before = whole_lines(path)
        if len(before) <= course.evaluations:
            write_atomically(path, "".join(before) + to_json(line) + "\n")

    def _tell(self) -> None:
        course = self.course
        names = ("round", "env_steps", "episodes", "updates")
        self.status.facts |= {name: getattr(course, name) for name in names}

    # ---- memory -------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Begin, or go on from what is on disk."""
        run, found = self.roster.run.hex(), self.journal.load()
        if found is None:
            if self.config.private:
                self.ledger = self._new_ledger()
            self._save()
            return
        arrays, facts, records = found
        if facts["run"] != run:
            raise UsageError(
                f"{self.folder} belongs to another team or to other settings; choose another --out."
            )
        leaves, form = jax.tree.flatten(self.learner)
        self.learner = jax.tree.unflatten(form, [arrays[str(i)] for i in range(len(leaves))])
        self.course = Course.of(facts["course"])
        self.last = Record.of_line(facts["last"]) if facts["last"] else None
        self.parted = facts["parted"]
        self._refill()
        if self.config.private:
            self.ledger = Ledger.read(self.folder, fingerprint(self.config))
            self.ledger.go_on(*facts["ledger"])
        for record in records:
            self._next()
            self._apply(record)

    def _new_ledger(self) -> Ledger:
        if Ledger.begun(self.folder):
            raise PevdnError(
                f"{self.folder} has no snapshot-*.bin, but its ledger counts updates that "
                f"{self.me} has made; restore the directory from a backup, or start the whole team "
                "anew in another one."
            )
        plan = Plan.of(self.config, self.agents)
        own = sum(x.size for x in jax.tree.leaves(self.learner.params))
        accounting.check_size(own * self.agents, plan.exposure)
        facts = (plan.mechanism, 1, plan.exposure, self._affordable)
        source = randomness.source(self.config)
        return Ledger.begin(self.folder, fingerprint(self.config), *facts, source)

    def _refill(self) -> None:
        """The replay buffer as it was when the snapshot was made."""
        for block in range(self._oldest(), self.course.blocks):
            self._put_in(block)

    def _oldest(self) -> int:
        """The first block of episodes that is in the buffer, in whole or in part."""
        size, block_size = self.config.settings.buffer_size, courses.block_size(self.config)
        return max(0, self.course.episodes - size) // block_size

    def _save(self) -> None:
        """A snapshot, so that less has to be computed again.

        Episodes that left the buffer since the last one are needed until now: after a kill the
        rounds in between are computed again.
        """
        arrays = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(self.learner))}
        facts = {
            "run": self.roster.run.hex(),
            "agent": self.index,
            "course": asdict(self.course),
            "last": self.last.to_line() if self.last is not None else None,
            "ledger": self.ledger.position if self.ledger is not None else None,
            "parted": self.parted,
        }
        self.journal.save(self.course.round, arrays, facts)
        self.journal.drop_before(self._oldest())

    # ---- time ---------------------------------------------------------------------------------

    async def _compute(self, work: Callable[..., Result], *args: Any) -> Result:
        """In a thread, so that peers are answered meanwhile."""
        with self.status.spending("computing"):
            return await asyncio.to_thread(work, *args)

    async def _beat(self) -> None:
        while True:
            self.status.write()
            await asyncio.sleep(1.0)


def _check_one_at_a_time(config: configuration.Config) -> None:
    """A body plays one episode at a time; of several, all but one would be made up."""
    s = config.settings
    for name, value in (
        ("parallel_episodes", s.parallel_episodes),
        ("update_every", s.update_every),
        ("eval_episodes", s.eval_episodes),
    ):
        if value != 1:
            raise UsageError(
                f"{name} is {value}, but a party with a body of its own plays one episode at a "
                "time; set it to 1."
            )
