"""One agent as a process: Algorithm 1 as steps that the whole team completes or none does.

    play       RUN a block of episodes, APPEND them, and agree on a seed for its minibatches
    update     CHOOSE a minibatch, COMPUTE m_i, open Σ m_i, and UPDATE
    evaluate   play greedy episodes and agree on the score

If openings are noised (pe-vdn-d), no seed is needed, and one step replaces all updates of a block:

    open       CLIP and noise the shares of the team error, open their sum, and make all updates
               that the block calls for alone, each from a minibatch of the party's own

A step ends with its outcome in the journal (`recovery.py`); what the agent computes from it is in
`state.py`. All that leaves this process is in wire.proto: the messages of `protocol.py` to peers,
and actions to the world.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pevdn import worlds
from pevdn.agent import evaluation
from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.errors import PevdnError, UsageError
from pevdn.network import catch_up, playing, readme, secure_sum
from pevdn.network import wire_pb2 as wire
from pevdn.network.compiled_agent import CompiledAgent, Messages, Offers
from pevdn.network.environment import Body, BodyEnvironment, RemoteWorld
from pevdn.network.group import Group
from pevdn.network.lifecycle import FAREWELL, connected
from pevdn.network.membership import FINISHED, Stopped, ViewChanged
from pevdn.network.playing import Player
from pevdn.network.progress import EVALUATE, OPEN, PLAY, UPDATE
from pevdn.network.protocol import Protocol
from pevdn.network.randomness import FromSecret, FromSeed, Randomness
from pevdn.network.recovery import Outcome
from pevdn.network.roster import Roster
from pevdn.network.state import PartyState
from pevdn.network.status import Status
from pevdn.network.streams import Secret
from pevdn.storage.files import make_private, write_atomically
from pevdn.worlds.interface import AgentSpec

SNAPSHOT_EVERY = 200  # steps of the protocol, or updates where one step makes several
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
        self.names = [party.name for party in roster.parties]
        index, agents = roster.index(me), len(roster.parties)
        spec, max_steps = _interface(roster, me, body)
        make_private(folder)
        write_atomically(folder / "config.yaml", configuration.to_text(self.config))
        readme.leave(folder, self.config, roster.rehearsal)
        secret = Secret.load_or_create(folder / "secret")
        random: Randomness = (
            FromSeed(self.config, agents, index)
            if roster.rehearsal
            else FromSecret(self.config, secret, roster.run)
        )
        agent = CompiledAgent(self.config, spec, agents, max_steps)
        self.state = PartyState(self.config, roster.run, me, index, agent, random, folder)
        mask_key = secret.mask_key().public_key().public_bytes_raw()
        completed = lambda: self.state.progress.step  # noqa: E731
        self.group = Group(roster, me, key, completed, mask_key, listen, folder)
        self.group.outcome_of = self._outcome_of
        self.group.ended = lambda: self.state.ended
        self.status = Status(folder, self.group)
        room = _room(self.config, max_steps)
        self.protocol = Protocol(roster, me, secret, self.group, self.status, room)
        environment = RemoteWorld(self.group, spec) if body is None else BodyEnvironment(body)
        self.player = Player(self.config, agent, environment, random, max_steps, self.status)
        self._report()

    # ---- the loop over steps ------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the end; wait for members that restart."""
        state, status = self.state, self.status
        unfinished = self.group.members.unfinished(self.group.others)
        if state.all_finished or (state.ended and not unfinished):
            status.state = "finished"
            status.write()
            return
        async with connected(self.group, status):
            try:
                while True:
                    try:
                        await self._train()
                        break
                    except ViewChanged:
                        status.event("view changed", step=state.progress.step)
            except Exception as problem:
                state.save()
                if not (isinstance(problem, Stopped) and state.ended):
                    raise
                status.state = "finished"  # the others are gone, and nothing is left to do
                await self.group.say_farewell(FINISHED, FAREWELL)

    async def _train(self) -> None:
        """Agree on a view, make all steps that are left, and leave with the others."""
        state, status = self.state, self.status
        status.state = "looking for the others"
        completed = await self.group.agree()
        await self._catch_up({name: completed[name] for name in self.names})
        self.protocol.start_view()
        status.event("view agreed", step=state.progress.step)
        status.state = "training"
        steps: dict[str, Callable[[int], Any]] = {
            PLAY: self._play,
            OPEN: self._open,
            UPDATE: self._update,
            EVALUATE: self._evaluate,
        }
        while (kind := state.next_kind()) in steps:
            outcome, entered = await steps[kind](state.progress.step + 1)
            await self._complete(outcome, entered)
        state.save()
        status.state = "finished"
        state.all_finished = await self.group.leave()
        state.save()

    async def _complete(self, outcome: Outcome, entered: Messages | Offers | None = None) -> None:
        """Write the outcome to the journal, then apply it."""
        self.state.journal.append(outcome)
        await self._compute(self.state.apply, outcome, entered)
        self._report()
        self.status.steps[outcome.kind] += 1
        self.group.discard(outcome.step)
        updates = self.config.updates_due if self.config.noised else 1
        if outcome.step % max(1, SNAPSHOT_EVERY // updates) == 0:
            self.state.save()

    # ---- the steps ----------------------------------------------------------------------------

    async def _play(self, step: int) -> tuple[Outcome, None]:
        """RUN a block of episodes, APPEND them to the disk, and agree on a seed.

        The seed is made after the episodes, so that no party can know while playing which of them
        it will learn from. If openings are noised, there is none: each party has its own samples.
        """
        progress, learner = self.state.progress, self.state.learner
        block = progress.blocks
        recorder = await self.player.play_block(step, block, learner.params, progress.env_steps)
        facts = playing.public_facts(recorder)
        self.state.journal.write_block(block, playing.pack(recorder, self.state.agent), facts)
        words, nonces = np.frombuffer(facts, "<u4").astype(np.uint32), {}
        if self.config.noised:
            await self.protocol.compare_facts(step, facts)
        else:
            nonces = await self.protocol.agree_on_seed(step, facts)
        return Outcome(step, PLAY, words, nonces), None

    async def _open(self, step: int) -> tuple[Outcome, Offers]:
        """Open the team errors of the episodes that are due; they are booked before."""
        offers = await self._compute(self.state.offers)
        total = await self.protocol.open_sum(step, offers.words)
        return Outcome(step, OPEN, total), offers

    async def _update(self, step: int) -> tuple[Outcome, Messages]:
        """CHOOSE a minibatch, COMPUTE m_i and open the sum."""
        messages = await self._compute(self.state.messages)
        if not messages.fit:  # never with DP, where messages saturate
            agent = self.state.agent
            raise PevdnError(agent.code.refusal(agent.n_agents, f"a message of {self.me}"))
        total = await self.protocol.open_sum(step, messages.words)
        return Outcome(step, UPDATE, total), messages

    async def _evaluate(self, step: int) -> tuple[Outcome, None]:
        """Play greedy episodes with the next model; the score is public in the team."""
        progress = self.state.progress
        model = progress.models(self.config)[len(progress.scores)]
        number = evaluation.key_number(progress.evaluations, model)
        played = await self.player.evaluate(step, number, getattr(self.state.learner, model))
        score = played.won.mean(), played.total.mean(), played.t.mean()
        words = np.array(score, np.float32).view(np.uint32)
        await self.protocol.compare(step, words, "scores")
        return Outcome(step, EVALUATE, words), None

    # ---- catch up -----------------------------------------------------------------------------

    async def _catch_up(self, completed: dict[str, int]) -> None:
        """Complete a step whose end this party missed, with the outcome that its peers report."""
        own, newest = self.state.progress.step, max(completed.values())
        ahead = [name for name in self.names if completed[name] == newest]
        if newest > own + 1:
            raise PevdnError(
                f"{ahead[0]} has completed step {newest}, but {self.me} only {own}: {self.folder} "
                f"lacks files of {self.me}; restore them, or restart the whole team."
            )
        if newest == own:
            return
        kind = self.state.next_kind()
        outcome = await catch_up.missed_outcome(self.group, newest, ahead)
        entered: Messages | Offers | None = None
        if kind == OPEN:
            entered = await self._compute(self.state.offers)
        elif kind == UPDATE:
            entered = await self._compute(self.state.messages)
        if not self._is_plausible(outcome, kind, entered):
            raise PevdnError(
                f"{' and '.join(ahead)} reported an impossible outcome of step {newest} to "
                f"{self.me}; one of them is faulty, or has lost its files."
            )
        self.status.event("caught up", step=newest)
        await self._complete(outcome, entered)

    def _is_plausible(self, outcome: Outcome, kind: str, entered: Messages | Offers | None) -> bool:
        """Whether a step that this party missed the end of can have this outcome."""
        if outcome.kind != kind:
            return False
        if kind == PLAY:
            own = self.state.journal.facts(self.state.progress.blocks)
            if own is None and self.config.noised:
                return False  # peers cannot have compared a block that this party never wrote
            if own is not None and secure_sum.to_bytes(outcome.words) != own:
                return False  # the episodes on this disk are of another attempt
            names = set() if self.config.noised else set(self.names)
            nonce = None if self.config.noised else self.protocol.nonce(outcome.step)
            return set(outcome.nonces) == names and outcome.nonces.get(self.me) == nonce
        if entered is None:
            return len(outcome.words) == 3
        alone = self.config.exchange == "alone"
        return len(outcome.words) == (0 if alone else len(entered.words))

    def _outcome_of(self, step: int) -> wire.Outcome | None:
        last = self.state.last
        return catch_up.to_wire(last) if last is not None and last.step == step else None

    # ---- helpers ------------------------------------------------------------------------------

    async def _compute(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run in a thread, so that peers are answered meanwhile."""
        with self.status.spending("computing"):
            return await asyncio.to_thread(work, *args)

    def _report(self) -> None:
        names = ("step", "env_steps", "episodes", "updates")
        counters = {name: getattr(self.state.progress, name) for name in names}
        self.status.facts |= self.state.line | counters


def _interface(roster: Roster, me: str, body: Body | None) -> tuple[AgentSpec, int]:
    """Return what the agent observes and can do, and the longest episode."""
    if roster.config.exchange == "central":
        raise UsageError(
            f"{roster.config.algorithm} has a central node that sees everything, so it cannot run "
            "on several machines; train it with `pevdn train`."
        )
    if body is not None:
        _check_one_at_a_time(roster.config)
        return body.spec, body.max_steps
    if roster.world is None:
        raise UsageError(
            f"{roster.path} has no [world], so {me} needs its own body; start it from Python, as "
            "in examples/own_body.py."
        )
    world = worlds.make(roster.config.env)
    return world.agents[roster.index(me)], world.max_steps


def _check_one_at_a_time(config: Config) -> None:
    """Refuse settings that need several episodes at a time: a body plays one."""
    for name in ("parallel_episodes", "update_every", "eval_episodes"):
        value = getattr(config.settings, name)
        if value != 1:
            raise UsageError(
                f"{name} is {value}, but a party with its own body plays one episode at a time; "
                "set it to 1."
            )


def _room(config: Config, max_steps: int) -> int:
    """Return a number of words that nearly every Poisson sample fits into; 0: pad no sum.

    An opening needs no padding: it covers whole blocks of episodes, whose lengths are public.
    """
    if not config.private or config.noised:
        return 0
    expected = config.settings.expected_batch_size
    return math.ceil(expected + 4 * math.sqrt(expected)) * max_steps
