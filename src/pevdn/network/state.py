"""One party's agent and counters, and what each step of the protocol changes in them.

`apply` is deterministic: the same outcome gives the same parameters, bit for bit, in training and
in the replay of a journal after a kill.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from pevdn.agent import evaluation, schedule
from pevdn.agent.evaluation import Score
from pevdn.agent.networks import Parameters
from pevdn.agent.packed_replay import PackedReplay
from pevdn.config.experiment import Config, fingerprint
from pevdn.config.settings import MOST
from pevdn.errors import PevdnError, UsageError
from pevdn.network import secure_sum
from pevdn.network.compiled_agent import CompiledAgent, Messages, Offers
from pevdn.network.membership import PROTOCOL, Stopped
from pevdn.network.progress import END, OPEN, PLAY, UPDATE, Progress
from pevdn.network.randomness import Randomness
from pevdn.network.recovery import Journal, Outcome
from pevdn.network.streams import hashed, joint_seed
from pevdn.privacy import ledger, planner
from pevdn.privacy.ledger import Ledger
from pevdn.privacy.mechanism import SubsampledGaussian
from pevdn.storage.files import whole_lines, write_atomically
from pevdn.storage.strict_json import to_json


class PartyState:
    """Agent, replay buffer, counters, journal and ledger of one party; recovers from its files."""

    def __init__(
        self,
        config: Config,
        run: bytes,
        me: str,
        index: int,
        agent: CompiledAgent,
        random: Randomness,
        folder: Path,
    ) -> None:
        self.config, self.run, self.me, self.index = config, run, me, index
        self.agent, self.random, self.folder = agent, random, folder
        self.journal = Journal(folder)
        self.progress = Progress.begin(config)
        self.learner = agent.begin(random.initial_parameters())
        self.replay = PackedReplay(config.settings.buffer_size)
        self.last: Outcome | None = None  # of the last step, for a peer that missed it
        self.all_finished = False  # all other members have finished as well
        self._applying = False  # an outcome is applied in part only
        self.ledger: Ledger | None = None
        self.line: dict[str, object] = {}  # the newest line of metrics.jsonl
        self._affordable = planner.affordable(config, agent.n_agents)
        self._recover()

    # ---- what comes next ----------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.progress.next_kind(self.config) == END

    def next_kind(self, replaying: bool = False) -> str:
        """Return the kind of the next step; skip updates that are not due.

        Unless `replaying`, stop before a step whose updates the party cannot afford.
        """
        while (kind := self.progress.next_kind(self.config)) == UPDATE:
            if self._update_is_due():
                break
        if kind in (OPEN, UPDATE) and not replaying:
            self._check_budget(self.config.updates_due if kind == OPEN else 1)
        return kind

    def _update_is_due(self) -> bool:
        """Whether the next update is made; if not, all parties skip it."""
        progress = self.progress
        coin = self.random.coin(*self._position())
        if not schedule.update_is_due(progress.episodes, coin, self.config):
            self.progress = replace(progress, considered=progress.considered + 1)
            return False
        exposure = progress.current_exposure(self.config)
        if self._affordable is not None and exposure >= self._affordable:
            self.progress = replace(progress, exhausted_at=progress.evaluations)
            return False
        return True

    def _check_budget(self, updates: int) -> None:
        """Stop if the next updates cost too much together with those lost in crashes."""
        if self._affordable is None or self.ledger is None:
            return
        exposure = self.progress.current_exposure(self.config)
        reached = min(exposure + updates, self._affordable)
        if exposure < reached > self._affordable - self.ledger.lost[0]:
            raise Stopped(
                f"the privacy budget of {self.me} is spent: updates that it may have lost in a "
                "crash count as well."
            )

    def _position(self) -> tuple[bytes, int, int]:
        """Return seed and number of the block, and the number of the next update in it."""
        progress = self.progress
        return bytes.fromhex(progress.seed), progress.blocks - 1, progress.considered

    def messages(self) -> Messages:
        """CHOOSE the next minibatch, the same for all parties, and COMPUTE its messages."""
        return self.agent.messages(self.learner, self.replay, self._minibatch())

    def _minibatch(self) -> np.ndarray:
        """CHOOSE the slots of the next minibatch (parts, B)."""
        filled = schedule.filled(self.progress.episodes, self.config.settings.buffer_size)
        words = self.random.minibatch(*self._position())
        return self.agent.choose(words, filled, self.replay.length)

    def offers(self) -> Offers:
        """CLIP and noise the messages of all blocks that are opened now, and book the opening.

        Guarantee: a party never enters two versions of its messages into the opening of a step.
        The noise depends on the secret, the step and the number of the opening alone; the ledger
        books a digest of the result before it is returned, and refuses another one for this step,
        also after a crash and in another view. The digest includes the secret words that the noise
        is made of, so that the ledger does not reveal the result.
        """
        progress, E = self.progress, self.config.block_size
        self._take_salt(progress.step + 1)
        offers, drawn = [], []
        for number, age in enumerate(schedule.opening_ages(self.config)):
            first = progress.episodes - E - age
            if first < 0:
                continue
            slots = schedule.slots(first, np.arange(E), self.config.settings.buffer_size)
            position = progress.step + 1, progress.blocks - 1, number
            drawn.append(self.random.opening(*position, self.agent.max_steps))
            offers.append(self.agent.offer(self.learner, self.replay, slots, drawn[-1]))
        words = np.concatenate([offer.words for offer in offers])
        assert self.ledger is not None
        self.ledger.book_opening(progress.step + 1, ledger.digest([words, *drawn]))
        return Offers(offers, words)

    def _take_salt(self, step: int) -> None:
        """Draw the random numbers of a step with the salt that the ledger has for it."""
        if self.ledger is not None:
            self.random.salt = self.ledger.salt(step)

    # ---- apply an outcome ---------------------------------------------------------------------

    def apply(self, outcome: Outcome, entered: Messages | Offers | None = None) -> None:
        """Store, learn or score; the same every time for the same outcome.

        `entered` is this party's part of an opened sum; if it is not given, it is computed again.
        """
        self._applying = True
        self._take_salt(outcome.step)
        if outcome.kind == PLAY:
            self._store(outcome)
        elif outcome.kind == OPEN:
            offers = entered if isinstance(entered, Offers) else self.offers()
            self._store_opened(offers, outcome.words)
            # The opening keeps its salt, but a party that goes on from a backup may see another
            # sum: what it then learns from gets other samples and other noise.
            self.random.salt += ledger.digest([outcome.words])
            self._learn_alone()
        elif outcome.kind == UPDATE:
            messages = entered if isinstance(entered, Messages) else self.messages()
            self._learn(messages, outcome.words)
        else:
            self._score(Score(*map(float, outcome.words.view(np.float32))))
        self.last, self._applying = outcome, False

    def _store(self, outcome: Outcome) -> None:
        """APPEND a block of episodes.

        Its seed depends on all nonces and on the block itself. If openings are noised, minibatches
        are not drawn from it, and it only decides which updates are made (`buffer_throughput`):
        then it is public and fixed in advance by the run and the number of the block.
        """
        joint = joint_seed(outcome.nonces, self.run, outcome.step)
        seed = hashlib.sha256(joint + secure_sum.to_bytes(outcome.words)).digest()
        if self.config.noised:
            seed = hashed("coins of a block", self.run, self.progress.blocks)
        env_steps = self._load_block(self.progress.blocks)
        self.progress = self.progress.after_block(self.config, env_steps, seed)

    def _load_block(self, block: int) -> int:
        """Read a block of own episodes into the buffer; return the number of steps in it."""
        episodes = self.journal.read_block(block)
        if episodes is None:
            raise PevdnError(
                f"the episodes of block {block} are missing in {self.folder}, and no peer has "
                "them; restore the directory, or restart the whole team."
            )
        E, size = self.config.block_size, self.config.settings.buffer_size
        for e in range(E):
            slot = schedule.slots(block * E, e, size)
            self.replay.rows[slot], self.replay.length[slot] = episodes.rows[e], episodes.length[e]
        return int(episodes.length.sum())

    def _store_opened(self, offers: Offers, total: np.ndarray) -> None:
        """Store what was opened of each episode: the team error without this agent's message."""
        position = 0
        for offer in offers.blocks:
            words = total[position : position + len(offer.words)]
            position += len(words)
            opened = self.agent.opened(offer, words)
            for e, slot in enumerate(offer.slots):
                self.replay.open(slot, opened[:, e])

    def _learn_alone(self) -> None:
        """Make the updates that the block calls for, from this party's own minibatches.

        No message is sent and nothing is agreed on. But peers see when the party is ready for the
        next step: the time that its updates take reveals about how large its samples are, which
        no ε here accounts for.
        """
        while self.progress.next_kind(self.config) == OPEN:  # updates of the block are left
            if self._update_is_due():
                if self.ledger is None or self.ledger.up_to_date:  # not a repetition
                    self._check_budget(1)
                slots = self._minibatch()
                self._update(self.agent.gradient_alone(self.learner, self.replay, slots))
        self.progress = self.progress.advance()

    def _learn(self, messages: Messages, total: np.ndarray) -> None:
        """Make an update from the opened sum of a common minibatch."""
        if self.config.exchange == "alone":
            total = messages.words
        self._update(self.agent.gradient(self.learner, messages, total))
        self.progress = self.progress.advance()

    def _update(self, gradient: Parameters) -> None:
        """UPDATE from the sum of gradients; if private, book it before and after."""
        progress, agent = self.progress, self.agent
        step, (_, *position) = progress.step + 1, self._position()
        chunk = None if self.ledger is None else self.ledger.reserve(step, 1, [MOST], 1)
        mean = agent.mean(gradient, partial(self.random.noise, step, *position))
        counts = progress.updates, progress.env_steps, progress.anchored
        learner = agent.update(self.learner, mean, *counts)
        made = progress.after_update(self.config)
        if self.ledger is not None and chunk is not None:
            digest = ledger.digest(jax.tree.leaves(learner.params))
            if chunk.digest not in ("", digest):
                raise PevdnError(
                    f"step {step} gave another result when {self.me} repeated it, so the same "
                    "noise would hide two different gradients; continue on the machine where it "
                    "was first made, or restart the whole team."
                )
            self.ledger.settle(chunk, [1], [made.exposure], digest)
        self.learner, self.progress = learner, made

    def _score(self, score: Score) -> None:
        """Note the score of one model; after the last one write the metrics."""
        progress, s = self.progress, self.config.settings
        model = progress.models(self.config)[len(progress.scores)]
        candidate = s.anchor and model == evaluation.candidate(s)
        if candidate and evaluation.beats(score.win_rate, progress.threshold):
            # Without an average, `average` follows the parameters.
            self.learner = self.learner._replace(anchor=self.learner.average)
            progress = replace(progress, anchored=True, threshold=score.win_rate)
        scores = (*progress.scores, tuple(score))
        models = progress.models(self.config)
        if len(scores) < len(models):
            self.progress = progress.advance(scores=scores)
            return
        self._write_metrics(dict(zip(models, map(Score._make, scores), strict=True)))
        self.progress = progress.advance(scores=(), evaluations=progress.evaluations + 1)

    def _write_metrics(self, scores: dict[str, Score]) -> None:
        """Append a line to metrics.jsonl, unless a replayed step wrote it before."""
        every = {model: scores.get(model) for model in evaluation.models(self.config.settings)}
        spent = self.ledger.spent()[0]._asdict() if self.ledger is not None else None
        self.line = evaluation.metrics_line(self.config.seed, asdict(self.progress), every, spent)
        path = self.folder / "metrics.jsonl"
        before = whole_lines(path)
        if len(before) <= self.progress.evaluations:
            write_atomically(path, "".join(before) + to_json(self.line) + "\n")

    # ---- save and recover ---------------------------------------------------------------------

    def save(self) -> None:
        """Write a snapshot, and delete the episodes that no replay needs any more.

        After an error in the middle of a step there is nothing to write: the journal holds the
        step's outcome, and a restarted party applies it from the start.
        """
        if self._applying:
            return
        arrays = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(self.learner))}
        if self.config.noised:
            opened = [self.replay.opened(slot) for slot in range(len(self.replay.rows))]
            arrays["opened"] = np.concatenate(opened)
        facts = {
            "protocol": PROTOCOL,
            "run": self.run.hex(),
            "agent": self.index,
            "progress": asdict(self.progress),
            "last": self.last.to_line() if self.last is not None else None,
            "ledger": self.ledger.position if self.ledger is not None else None,
            "all_finished": self.all_finished,
        }
        self.journal.save(self.progress.step, arrays, facts)
        self.journal.delete_blocks_before(self.progress.oldest_block(self.config))

    def _recover(self) -> None:
        """Start afresh, or load the newest snapshot and replay the journal."""
        found = self.journal.load()
        if found is None:
            if self.config.private:
                self.ledger = self._new_ledger()
            self.save()
            return
        arrays, facts, outcomes = found
        if facts.get("protocol") != PROTOCOL:
            raise UsageError(
                f"{self.folder} was written by another version of pevdn; finish that team with "
                "that version, or choose another --out."
            )
        if facts["run"] != self.run.hex():
            raise UsageError(
                f"{self.folder} belongs to another team or to other settings; choose another --out."
            )
        leaves, tree = jax.tree.flatten(self.learner)
        self.learner = jax.tree.unflatten(tree, [arrays[str(i)] for i in range(len(leaves))])
        self.progress = Progress.from_json(facts["progress"])
        self.last = Outcome.from_line(facts["last"]) if facts["last"] else None
        self.all_finished = facts["all_finished"]
        for block in range(self.progress.oldest_block(self.config), self.progress.blocks):
            self._load_block(block)
        if self.config.noised:
            ends = np.cumsum(self.replay.length)[:-1]
            for slot, opened in enumerate(np.split(arrays["opened"], ends)):
                self.replay.open(slot, opened)
        if self.config.private:
            self.ledger = Ledger.read(self.folder, fingerprint(self.config))
            self.ledger.go_on(*facts["ledger"])
        for outcome in outcomes:
            self.next_kind(replaying=True)
            self.apply(outcome)
        if self.ledger is not None:
            self.ledger.new_salt(self.progress.step)

    def _new_ledger(self) -> Ledger:
        if Ledger.begun(self.folder):
            raise PevdnError(
                f"{self.folder} has no snapshot-*.bin, but its ledger counts updates of {self.me}; "
                "restore the directory from a backup, or restart the whole team in another one."
            )
        release, agents = self.agent.release, self.agent.n_agents
        assert isinstance(release, SubsampledGaussian)
        own = sum(x.size for x in jax.tree.leaves(self.learner.params))
        facts = release, agents, own * agents, self.agent.max_steps
        return planner.begin_ledger(self.folder, self.config, *facts)
