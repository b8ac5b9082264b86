"""Prove the paper's technical privacy policy of the program: whose data can reach whom.

"Sharing environment interaction data is forbidden": an agent's observations, actions, records and
parameters stay with it. `violations` traces the programs of a simulation and follows every value
through every equation (the jaxpr), tracking whose data it depends on. An output depends on all
inputs of its equation; a value written by a branch or a loop also depends on its condition. An
empty result therefore means that no agent's state depends on another agent's data except through
the permitted channels:

- The world. Actions go in, each agent gets its own observation, all get reward and end.
- The exchange. One number per agent, step and episode goes in; the opened result is public. What
  that number reveals, and what the exchange hides of it, is outside this proof. Agents that learn
  alone have none.
- The noised opening (pe-vdn-d), in place of the exchange. What goes in must be a clipped message
  plus noise: the proof follows clip and noise to the addition of the two. That both are large
  enough is outside this proof.

Public data (rewards, lengths, counters, random keys) must depend on no agent's data, or the next
call would start from a leak. Since it does not, the proof holds for any number of calls. `start`
needs no check: it depends on the seed alone.

The proof needs a separate variable for each agent's arrays, so it makes every agent a kind of its
own. Otherwise like agents share one array axis over which the same code is mapped; that both
programs compute the same is tested, not proved. The proof finds mistakes, not sabotage: it trusts
marks, including forged ones.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from pevdn.exchange import Exchange, Opened
from pevdn.exchange.alone import alone
from pevdn.privacy.mechanism import NoisedOpening
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State
from pevdn.simulation.team import Kind, TeamLayout
from pevdn.worlds.base import Step, World
from pevdn.worlds.external import require_jax


class Source(NamedTuple):
    """The origin of data."""

    owner: str  # "agent 0", or "the world"
    sent: bool = False  # it left its owner as an action or a message
    hidden: str = ""  # "clipped"; "noised": clipped, and noise was added

    def __str__(self) -> str:
        return " ".join(filter(None, (self.hidden, "output" if self.sent else "data", "of"))) + (
            f" {self.owner}"
        )


Sources = frozenset[Source]  # everything a value depends on
PUBLIC: Sources = frozenset()
NOISE: Sources = frozenset([Source("the noise")])  # of an opening, before it is added


class Violation(NamedTuple):
    program: str  # the method of the simulation
    reached: str
    source: str

    def __str__(self) -> str:
        return f"{self.program}: {self.reached} is reached by {self.source}"


def violations(simulation: Simulation) -> list[Violation]:
    """Return every forbidden flow in the programs of a simulation; nothing is compiled."""
    watched = watch(simulation)
    state = jax.eval_shape(watched.start, jax.ShapeDtypeStruct((1,), jnp.int32))
    owners = policy(state)
    params, their_owners = (tuple(x.params for x in s.learners) for s in (state, owners))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    until_most_limit, public = (number, number, state.updates), (PUBLIC, PUBLIC, PUBLIC)
    due = (watched.config.updates_due, "updates")
    if watched.config.noised:
        due = (len(watched.ages), "openings")
    return [
        *_check(watched.advance, (state, *until_most_limit), (owners, public), owners, due),
        *_check(watched.keep_anchor, (state, state.threshold), (owners, PUBLIC), owners),
        *_check(watched.evaluate, (params, state.key), (their_owners, PUBLIC)),
    ]


def policy(state: State) -> State:
    """Return the owner of each array of a state with one kind per agent, or `PUBLIC`."""

    def own(i: int, tree: Any) -> Any:
        return jax.tree.map(lambda _: frozenset([Source(f"agent {i}")]), tree)

    shared = {"rewards": PUBLIC, "terminal": PUBLIC, "length": PUBLIC}  # with the whole team
    public: State = jax.tree.map(lambda _: PUBLIC, state)
    return public._replace(
        learners=tuple(own(i, learner) for i, learner in enumerate(state.learners)),
        replays=tuple(own(i, rows)._replace(**shared) for i, rows in enumerate(state.replays)),
    )


def _check(
    program: Callable[..., Any],
    args: Any,
    owners: Any,
    allowed: Any = None,
    due: tuple[int, str] = (0, "updates"),
) -> list[Violation]:
    """Compare the sources of each output with its owner in `allowed` (default: public).

    `due` says how many rounds of messages the program may make, and for what.
    """
    traced, shapes = jax.make_jaxpr(program, return_shape=True)(*args)
    walk = Walk()
    reached = walk.follow(traced, jax.tree.leaves(owners))
    permitted = jax.tree.leaves(allowed or jax.tree.map(lambda _: PUBLIC, shapes))
    paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
    for path, sources, own in zip(paths, reached, permitted, strict=True):
        walk.report(_name(path, own), _foreign(sources, own))
    number, purpose = due
    if (rounds := _rounds(traced.jaxpr)) > number:
        walk.report("the exchange", [f"{rounds} rounds of messages for {number} {purpose}"])
    return [Violation(program.__name__, *flow) for flow in walk.flows]


def _name(path: Any, own: Sources) -> str:
    """`.learners[1].params.input_bias` as "learner of agent 1 (params.input_bias)"."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if not own:
        return f"public data ({name})"
    part, agent, leaf = name.split(".", 2)
    return f"{part.removesuffix('s')} of agent {agent} ({leaf})"


def _foreign(sources: Sources, own: Sources) -> list[Source]:
    owners = {source.owner for source in own}
    return sorted(source for source in sources if source.owner not in owners)


# ---- permitted channels, marked in the program ---------------------------------------------

MARK = "pevdn:"


def _mark(what: str, whom: str, tree: Any) -> Any:
    """Add equations that change no value and that a `Walk` recognises."""
    return jax.tree.map(lambda x: checkpoint_name(x, f"{MARK}{what}:{whom}"), tree)


def _mark_each(what: str, arrays: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(_mark(what, f"agent {i}", x) for i, x in enumerate(arrays))


def watch(simulation: Simulation) -> Simulation:
    """Return the simulation with one kind per agent and the permitted channels marked."""
    watched = copy.copy(simulation)
    kinds = (Kind(spec, (i,)) for i, spec in enumerate(simulation.world.agents))
    watched.team = _WatchedTeam(tuple(kinds))
    world = _WatchedWorld(require_jax(simulation.world, "following its values"))
    watched.player, watched.replay = copy.copy(simulation.player), copy.copy(simulation.replay)
    watched.player.actors = dataclasses.replace(simulation.player.actors, team=watched.team)
    watched.player.world, watched.replay.team = world, watched.team
    if simulation.exchange not in (None, alone):
        watched.exchange = _watched_exchange(simulation, simulation.exchange)
    if simulation.opening is not None:
        opening = _WatchedOpening(**vars(simulation.opening))
        watched.program = dataclasses.replace(simulation.program, opening=opening)
        vars(watched)["form_sum"] = _watched_sum(simulation)
    return watched


@dataclasses.dataclass(frozen=True)
class _WatchedOpening(NoisedOpening):
    """Marks clipped messages and noise."""

    def clip(self, messages: Array) -> Array:
        clipped: Array = _mark("becomes", "clipped", super().clip(messages))
        return clipped

    def noise(self, words: Array) -> Array:
        noise: Array = _mark("becomes", "noise", super().noise(words))
        return noise


class _WatchedTeam(TeamLayout):
    """Marks actions and messages as sent where they leave the arrays by kind."""

    def by_agent(self, per_kind: Sequence[Array], axis: int) -> tuple[Array, ...]:
        return _mark_each("sent by", super().by_agent(per_kind, axis))


class _WatchedWorld:
    """Marks observations as the data of the agent that gets them."""

    def __init__(self, world: World) -> None:
        self.name, self.agents, self.max_steps = world.name, world.agents, world.max_steps
        self._world = world

    def reset(self, key: Array) -> tuple[Any, Step]:
        return self._hand_out(*self._world.reset(_mark("enters", "the world", key)))

    def step(self, key: Array, state: Any, actions: tuple[Array, ...]) -> tuple[Any, Step]:
        entering = _mark("enters", "the world", (key, state, actions))
        return self._hand_out(*self._world.step(*entering))

    def _hand_out(self, state: Any, step: Step) -> tuple[Any, Step]:
        observations, available, *shared = step
        return _mark("belongs to", "the world", state), Step(
            _mark_each("belongs to", observations),
            _mark_each("belongs to", available),
            *_mark("belongs to", "everyone", shared),
        )


def _watched_exchange(simulation: Simulation, exchange: Exchange) -> Exchange:
    expected = [(len(simulation.team), steps, simulation.part) for steps in simulation.horizons]

    def watched(key: Array, messages: Array) -> Opened:
        messages = _mark_round(messages, expected, jnp.float32)
        opened = exchange(*_mark("enters", "the exchange", (key, messages)))
        return Opened(*_mark("belongs to", "everyone", tuple(opened)))

    return watched


def _watched_sum(simulation: Simulation) -> Callable[[Array, Array], Array]:
    """Return the sum of an opening, which takes nothing but clipped messages with noise."""
    shape = (len(simulation.team), simulation.horizons[-1], simulation.config.block_size)

    def watched(keys: Array, words: Array) -> Array:
        words = _mark_round(words, [(*keys.shape, *shape)], jnp.uint32)
        total = simulation.form_sum(*_mark("enters", "the opening", (keys, words)))
        opened: Array = _mark("belongs to", "everyone", total)
        return opened

    return watched


def _mark_round(messages: Array, expected: Sequence[tuple[int, ...]], kind: Any) -> Array:
    """Count a round of messages (..., N, T, B); report one of another shape or type."""
    if messages.shape not in expected or messages.dtype != kind:
        what = f"{messages.dtype}{messages.shape}, not one number per agent, step and episode"
        messages = _mark("misused by", what, messages)
    counted: Array = _mark("round of", str(messages.size), messages)
    return counted


def _rounds(jaxpr: core.Jaxpr) -> int:
    """Count the uses of the exchange in one lane, from start to end; a `while` counts once."""
    count = 0
    for eqn in jaxpr.eqns:
        inner = [_rounds(part) for part in core.jaxprs_in_params(eqn.params)]
        once = max(inner) if eqn.primitive.name == "cond" else sum(inner)
        count += once * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        what, size = _mark_of(eqn)
        if what == "round of":  # mapped over an axis, it counts once per entry
            entered: Any = eqn.outvars[0].aval
            count += entered.size // int(size)
    return count


def _mark_of(eqn: core.JaxprEqn) -> tuple[str, str]:
    """Return the two parts of a mark; two empty texts for other equations."""
    name = eqn.params["name"] if eqn.primitive.name == "name" else ""
    if not name.startswith(MARK):
        return "", ""
    _, what, whom = name.split(":", 2)
    return what, whom


# ---- following values through a program ---------------------------------------------------

# Primitives that call an inner program with their own inputs and outputs, and its parameter name.
CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


class Walk:
    """Follows sources from the inputs of a program to its outputs, and collects forbidden flows."""

    def __init__(self) -> None:
        self.flows: dict[tuple[str, str], None] = {}  # (reached, source), in order
        self._known: dict[Any, list[Sources]] = {}  # loops repeat the same question

    def report(self, reached: str, sources: Iterable[Source | str]) -> None:
        self.flows.update({(reached, str(source)): None for source in sources})

    def follow(self, program: Any, inputs: Sequence[Sources]) -> list[Sources]:
        """Return the sources of each output, given those of each input."""
        key = (id(program), *inputs)
        if key not in self._known:
            self._known[key] = self._equations(getattr(program, "jaxpr", program), inputs)
        return self._known[key]

    def _equations(self, jaxpr: core.Jaxpr, inputs: Sequence[Sources]) -> list[Sources]:
        known = dict.fromkeys(jaxpr.constvars, PUBLIC)
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atoms: Sequence[Any]) -> list[Sources]:
            return [PUBLIC if isinstance(x, core.Literal) else known[x] for x in atoms]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._equation(eqn, read(eqn.invars)), strict=True))
        return read(jaxpr.outvars)

    def _equation(self, eqn: core.JaxprEqn, inputs: list[Sources]) -> list[Sources]:
        name, params = eqn.primitive.name, eqn.params
        if any(mark := _mark_of(eqn)):
            return [self._marked(*mark, inputs[0])]
        if name in CALLS:
            return self.follow(params[CALLS[name]], inputs)
        if name == "cond":
            which, *rest = inputs
            branches = [self.follow(branch, rest) for branch in params["branches"]]
            return [which.union(*outputs) for outputs in zip(*branches, strict=True)]
        if name == "while":
            return self._while(params, inputs)
        if name == "scan":
            return self._scan(eqn, inputs)
        if name == "add" and NOISE in inputs:
            (other,) = {*inputs} - {NOISE} or {NOISE}
            if all(source.hidden == "clipped" for source in other):
                return [frozenset(source._replace(hidden="noised") for source in other)]
        if eqn.effects or "callback" in name:
            self.report("the host", [f"a side effect ({name}), which cannot be followed"])
        # Arithmetic; also the safe choice for primitives with an unknown inner program.
        return [PUBLIC.union(*inputs)] * len(eqn.outvars)

    def _while(self, params: dict[str, Any], inputs: list[Sources]) -> list[Sources]:
        a = params["cond_nconsts"]
        b = a + params["body_nconsts"]

        def once(carry: list[Sources]) -> list[Sources]:
            (going,) = self.follow(params["cond_jaxpr"], [*inputs[:a], *carry])
            after = self.follow(params["body_jaxpr"], [*inputs[a:b], *carry])
            return [going.union(*both) for both in zip(carry, after, strict=True)]

        return _fixed_point(once, inputs[b:])

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Sources]) -> list[Sources]:
        # Inputs: constants, carry, slices; outputs: carry, slices. Slices have one axis less in the
        # body, which gives their number (its parameter has different names in JAX 0.10 and 0.11).
        body = eqn.params["jaxpr"]
        jaxpr = getattr(body, "jaxpr", body)
        n = _count_whole(eqn.outvars, jaxpr.outvars)
        b = _count_whole(eqn.invars, jaxpr.invars)
        a = b - n

        def once(outputs: list[Sources]) -> list[Sources]:
            after = self.follow(body, [*inputs[:a], *outputs[:n], *inputs[b:]])
            return [x | y for x, y in zip(outputs, after, strict=True)]

        return _fixed_point(once, inputs[a:b] + [PUBLIC] * (len(eqn.outvars) - n))

    def _marked(self, what: str, whom: str, sources: Sources) -> Sources:
        if what == "belongs to":
            return PUBLIC if whom == "everyone" else frozenset([Source(whom)])
        if what == "sent by":
            self.report(f"output of {whom}", _foreign(sources, frozenset([Source(whom)])))
            hidden = {source.hidden for source in sources} or {""}
            return frozenset(Source(whom, True, how) for how in hidden)
        if what == "becomes":
            if whom == "noise":
                self.report("the noise", sorted(sources))
                return NOISE
            return frozenset(source._replace(hidden=whom) for source in sources)
        if what == "enters":
            noised = whom == "the opening"
            raw = (x for x in sources if not x.sent or (noised and x.hidden != "noised"))
            self.report(whom, sorted(x for x in raw if x.owner != whom))
        if what == "misused by":
            self.report("the exchange", [whom])
        return sources


def _count_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outside, inside, strict=True))


def _fixed_point(
    once: Callable[[list[Sources]], list[Sources]], start: list[Sources]
) -> list[Sources]:
    """Iterate to the fixed point; sources are only added, so this terminates."""
    while (after := once(start)) != start:
        start = after
    return start
