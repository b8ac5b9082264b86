"""JaxMARL's cooperative worlds beyond SMAX, by their own names: `jaxmarl:NAME[?option=value]`.

The team's reward is the mean of what the agents are paid: the common reward where there is one.
Observations are flattened. The end of a world that only has a clock is a truncation; where the
game itself ends, or the number of steps is a rule of the game, it is not.

| world                          | pays         | ends           | is won, at the end, if       |
|--------------------------------|--------------|----------------|------------------------------|
| MPE_simple_spread_v3           | each its own | clock, 25      | every landmark is touched    |
| MPE_simple_reference_v3        | each its own | clock, 25      | both touch their landmark    |
| MPE_simple_speaker_listener_v4 | all the same | clock, 25      | the listener touches its own |
| switch_riddle                  | all the same | game, 4 N − 6  | one has told, rightly        |
| overcooked, overcooked_v2      | all the same | clock, 400     | a soup has been delivered    |
| hanabi                         | all the same | game, 89 (N=2) | all 25 points are made       |

An agent touches a landmark when the centres are closer than the two radii together, which is how
MPE defines a collision: 0.2 in spread, 0.35 in reference, 0.115 in speaker-listener.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.errors import UsageError, unknown
from pevdn.worlds.base import AgentSpec, EntityGroup, Step
from pevdn.worlds.maps import JAXMARL_GAMES
from pevdn.worlds.quiet import alone, silence

Options = dict[str, str]


class State(NamedTuple):
    game: Any  # JaxMARL's own
    paid: Array  # () bool, whether a reward above 0 has ever been paid


class Rules(NamedTuple):
    """How a world of JaxMARL is made, and what JaxMARL does not say about it."""

    place: str  # of the class, below jaxmarl.environments
    arguments: Callable[[Any, Options], dict[str, Any]]  # from its module and the options
    limit: Callable[[Any], int]  # steps of the longest episode
    clocked: bool  # every episode ends by the clock
    won: Callable[[Any, State], Array]
    entities: Callable[[Any], tuple[EntityGroup, ...]] = lambda env: ()  # in everyone's observation


class JaxmarlWorld:
    """A cooperative world of JaxMARL with discrete actions, such as `switch_riddle`."""

    def __init__(self, name: str) -> None:
        self.name = f"jaxmarl:{name}"
        game, _, query = name.partition("?")
        if game not in JAXMARL_GAMES:
            raise unknown("world", game, JAXMARL_GAMES)
        self._rules = RULES[game]
        self._env = _environment(self.name, self._rules, _options(game, query))
        self.max_steps = self._rules.limit(self._env)
        seen, _ = jax.eval_shape(self._env.reset, jax.random.key(0))
        entities = self._rules.entities(self._env)
        self.agents = tuple(
            AgentSpec(math.prod(seen[a].shape), int(self._env.action_space(a).n), entities)
            for a in self._env.agents
        )

    def reset(self, key: Array) -> tuple[State, Step]:
        observations, game = self._env.reset(key)
        state = State(_settled(game), jnp.zeros((), bool))
        return state, self._seen(state, observations, jnp.zeros(()), jnp.zeros((), bool))

    def step(self, key: Array, state: State, actions: tuple[Array, ...]) -> tuple[State, Step]:
        chosen = dict(zip(self._env.agents, jnp.stack(actions).astype(jnp.int32), strict=True))
        observations, game, rewards, dones, _ = self._env.step_env(key, state.game, chosen)
        paid = jnp.stack([rewards[a] for a in self._env.agents]).astype(jnp.float32)
        reward = jnp.mean(paid)
        game = _unless(state.game.done, _settled(game), state.game)
        state = State(game, state.paid | (reward > 0))
        return state, self._seen(state, observations, reward, dones["__all__"])

    def _seen(self, state: State, observations: Any, reward: Array, done: Array) -> Step:
        return Step(
            observations=tuple(
                observations[a].ravel().astype(jnp.float32) for a in self._env.agents
            ),
            available=self._available(state),
            reward=reward,
            done=done,
            truncated=done & self._rules.clocked,
            won=self._rules.won(self._env, state),
        )

    def _available(self, state: State) -> tuple[Array, ...]:
        """What JaxMARL calls legal, and everything where it has no such rule."""
        if not hasattr(self._env, "get_legal_moves"):
            return tuple(jnp.ones(agent.n_actions, bool) for agent in self.agents)
        legal = self._env.get_legal_moves(state.game)
        return tuple(legal[a].astype(bool) for a in self._env.agents)


# ---- what JaxMARL does not say ---------------------------------------------------------------


def _touched(env: Any, state: State) -> Array:
    """Which agent (rows) touches which landmark (columns) of a particle world."""
    places, n = state.game.p_pos, env.num_agents
    gaps = jnp.linalg.norm(places[:n, None] - places[None, n:], axis=-1)
    return gaps < env.rad[:n, None] + env.rad[None, n:]


def _every_landmark(env: Any, state: State) -> Array:
    return jnp.all(jnp.any(_touched(env, state), axis=0))


def _own_landmarks(env: Any, state: State) -> Array:
    return jnp.all(_touched(env, state)[jnp.arange(env.num_agents), state.game.goal])


def _listener_there(env: Any, state: State) -> Array:
    return _touched(env, state)[1, state.game.goal]


def _ever_paid(env: Any, state: State) -> Array:
    return state.paid


def _perfect(env: Any, state: State) -> Array:
    return state.game.score == env.num_colors * env.num_ranks


def _longest_hanabi(env: Any) -> int:
    """Every card is drawn one by one, every token is spent, and everyone has a last turn.

    A card that is drawn gives one token back at most, and the last one gives it too late.
    """
    drawn = int(env.deck_size) - env.num_agents * env.hand_size
    return drawn + (env.max_info_tokens + drawn - 1) + env.num_agents


PARTICLE_STEPS = 25


def _landmarks_and_others(env: Any) -> tuple[EntityGroup, ...]:
    """In spread: where they are, as seen from the agent; its own four numbers come first."""
    n = env.num_agents
    return EntityGroup(4, n, 2), EntityGroup(4 + 2 * n, n - 1, 2)


def _particles(place: str, won: Callable[[Any, State], Array], **more: Any) -> Rules:
    """A particle world (MPE); spread has as many landmarks as agents.

    It looks at the clock before moving it: told 25 steps, it would end after 26.
    """

    def arguments(module: Any, options: Options) -> dict[str, Any]:
        clock = {"max_steps": PARTICLE_STEPS - 1}
        if "num_agents" not in options:
            return clock
        n = int(options["num_agents"])
        return {**clock, "num_agents": n, "num_landmarks": n}

    return Rules(f"mpe.{place}", arguments, lambda env: PARTICLE_STEPS, True, won, **more)


def _sized(module: Any, options: Options) -> dict[str, Any]:
    return {"num_agents": int(options["num_agents"])}


def _furnished(module: Any, options: Options) -> dict[str, Any]:
    return {"layout": module.layouts[options["layout"]]}


def _named(module: Any, options: Options) -> dict[str, Any]:
    return {"layout": options["layout"]}


def _told(env: Any) -> int:
    return int(env.max_steps)


RULES: dict[str, Rules] = {
    "MPE_simple_spread_v3": _particles(
        "simple_spread.SimpleSpreadMPE", _every_landmark, entities=_landmarks_and_others
    ),
    "MPE_simple_reference_v3": _particles("simple_reference.SimpleReferenceMPE", _own_landmarks),
    "MPE_simple_speaker_listener_v4": _particles(
        "simple_speaker_listener.SimpleSpeakerListenerMPE", _listener_there
    ),
    "switch_riddle": Rules(
        "switch_riddle.switch_riddle.SwitchRiddle", _sized, _told, clocked=False, won=_ever_paid
    ),
    "overcooked": Rules(
        "overcooked.overcooked.Overcooked", _furnished, _told, clocked=True, won=_ever_paid
    ),
    "overcooked_v2": Rules(
        "overcooked_v2.overcooked.OvercookedV2", _named, _told, clocked=True, won=_ever_paid
    ),
    "hanabi": Rules(
        "hanabi.hanabi.HanabiEnv", _sized, _longest_hanabi, clocked=False, won=_perfect
    ),
}


# ---- making one ------------------------------------------------------------------------------


def _options(game: str, query: str) -> Options:
    """The options of a world, `layout=coord_ring&…`, over the defaults."""
    known = JAXMARL_GAMES[game].options
    options = {name: values[0] for name, values in known.items()}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if not known:
            raise UsageError(f"jaxmarl:{game} has no options, but was given '{part}'")
        if name not in known:
            raise unknown(f"option of jaxmarl:{game}", name, known)
        if value not in known[name]:
            raise unknown(name, value, known[name])
        options[name] = value
    return options


def _environment(world_id: str, rules: Rules, options: Options) -> Any:
    """JaxMARL's environment, of which nothing is printed and nothing else is imported."""
    path, _, name = rules.place.rpartition(".")
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Overcooked recommends its successor
        try:
            with alone(f"jaxmarl.environments.{path}"):
                module = importlib.import_module(f"jaxmarl.environments.{path}")
        except ImportError as missing:
            package = missing.name or missing
            raise UsageError(
                f"world '{world_id}' needs the Python package '{package}', which is not here"
            ) from missing
        return getattr(module, name)(**rules.arguments(module, options))


def _settled(game: Any) -> Any:
    """Without Python numbers, which are weakly typed at reset only: a loop would not close."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=jnp.asarray(x).dtype), game)


def _unless(over: Array, after: Any, before: Any) -> Any:
    """A game that is over stands still: Hanabi's would run out of moves and of numbers."""
    return jax.tree.map(lambda x, y: jnp.where(over, y, x), after, before)
