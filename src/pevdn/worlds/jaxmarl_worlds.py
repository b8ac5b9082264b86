"""JaxMARL's cooperative worlds other than SMAX: `jaxmarl:NAME[?option=value]`.

The team's reward is the mean of the agents' rewards. Observations are flattened. An episode that
ends by a time limit is truncated, unless the limit is a rule of the game.

| world                          | rewards      | ends           | won, at the end, if           |
|--------------------------------|--------------|----------------|-------------------------------|
| MPE_simple_spread_v3           | individual   | limit, 25      | every landmark is touched     |
| MPE_simple_reference_v3        | individual   | limit, 25      | both touch their landmark     |
| MPE_simple_speaker_listener_v4 | common       | limit, 25      | the listener touches its goal |
| switch_riddle                  | common       | game, 4 N − 6  | one announced it correctly    |
| overcooked, overcooked_v2      | common       | limit, 400     | a soup was delivered          |
| hanabi                         | common       | game, 89 (N=2) | all 25 points are scored      |

An agent touches a landmark if their distance is below the sum of the radii, MPE's definition of a
collision: 0.2 in spread, 0.35 in reference, 0.115 in speaker-listener.
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
from pevdn.worlds import arguments
from pevdn.worlds.base import AgentSpec, EntityGroup, Step
from pevdn.worlds.maps import JAXMARL_GAMES
from pevdn.worlds.quiet import isolated_import, silence

Options = dict[str, str]


class State(NamedTuple):
    game: Any  # JaxMARL's own state
    rewarded: Array  # () bool, whether the team has had a reward above 0


class Rules(NamedTuple):
    """How to build a JaxMARL world, and the facts that JaxMARL does not state about it."""

    place: str  # of the class, below jaxmarl.environments
    arguments: Callable[[Any, Options], dict[str, Any]]  # from its module and the options
    limit: Callable[[Any], int]  # steps of the longest episode
    timed: bool  # every episode ends by its time limit
    won: Callable[[Any, State], Array]
    entities: Callable[[Any], tuple[EntityGroup, ...]] = lambda env: ()  # of every agent


class JaxmarlWorld:
    """A cooperative JaxMARL world with discrete actions, such as `switch_riddle`."""

    def __init__(self, name: str) -> None:
        self.name = f"jaxmarl:{name}"
        game, _, query = name.partition("?")
        if game not in JAXMARL_GAMES:
            raise unknown("world", game, JAXMARL_GAMES)
        self._rules = RULES[game]
        self._env = _environment(self.name, self._rules, _options(game, query))
        self.max_steps = self._rules.limit(self._env)
        shapes, _ = jax.eval_shape(self._env.reset, jax.random.key(0))
        entities = self._rules.entities(self._env)
        self.agents = tuple(
            AgentSpec(math.prod(shapes[a].shape), int(self._env.action_space(a).n), entities)
            for a in self._env.agents
        )

    def reset(self, key: Array) -> tuple[State, Step]:
        observations, game = self._env.reset(key)
        state = State(strongly_typed(game), jnp.zeros((), bool))
        return state, self._result(state, observations, jnp.zeros(()), jnp.zeros((), bool))

    def step(self, key: Array, state: State, actions: tuple[Array, ...]) -> tuple[State, Step]:
        chosen = dict(zip(self._env.agents, jnp.stack(actions).astype(jnp.int32), strict=True))
        observations, game, rewards, dones, _ = self._env.step_env(key, state.game, chosen)
        reward = jnp.mean(jnp.stack([rewards[a] for a in self._env.agents]).astype(jnp.float32))
        game = _freeze(state.game.done, strongly_typed(game), state.game)
        state = State(game, state.rewarded | (reward > 0))
        return state, self._result(state, observations, reward, dones["__all__"])

    def _result(self, state: State, observations: Any, reward: Array, done: Array) -> Step:
        return Step(
            observations=tuple(
                observations[a].ravel().astype(jnp.float32) for a in self._env.agents
            ),
            available=self._available(state),
            reward=reward,
            done=done,
            truncated=done & self._rules.timed,
            won=self._rules.won(self._env, state),
        )

    def _available(self, state: State) -> tuple[Array, ...]:
        """Return JaxMARL's legal moves; all actions if the world has no such rule."""
        if not hasattr(self._env, "get_legal_moves"):
            return tuple(jnp.ones(agent.n_actions, bool) for agent in self.agents)
        legal = self._env.get_legal_moves(state.game)
        return tuple(legal[a].astype(bool) for a in self._env.agents)


# ---- facts that JaxMARL does not state -------------------------------------------------------


def _touched(env: Any, state: State) -> Array:
    """Return whether each agent (rows) touches each landmark (columns) of a particle world."""
    places, n = state.game.p_pos, env.num_agents
    gaps = jnp.linalg.norm(places[:n, None] - places[None, n:], axis=-1)
    return gaps < env.rad[:n, None] + env.rad[None, n:]


def _every_landmark(env: Any, state: State) -> Array:
    return jnp.all(jnp.any(_touched(env, state), axis=0))


def _own_landmarks(env: Any, state: State) -> Array:
    return jnp.all(_touched(env, state)[jnp.arange(env.num_agents), state.game.goal])


def _listener_at_goal(env: Any, state: State) -> Array:
    return _touched(env, state)[1, state.game.goal]


def _rewarded(env: Any, state: State) -> Array:
    return state.rewarded


def _perfect(env: Any, state: State) -> Array:
    return state.game.score == env.num_colors * env.num_ranks


def _longest_hanabi(env: Any) -> int:
    """Return the most steps of a game: all cards drawn, all tokens spent, one last turn each.

    Each card drawn returns at most one token, and the last one returns it too late.
    """
    drawn = int(env.deck_size) - env.num_agents * env.hand_size
    return drawn + (env.max_info_tokens + drawn - 1) + env.num_agents


PARTICLE_STEPS = 25


def _landmarks_and_others(env: Any) -> tuple[EntityGroup, ...]:
    """Return the groups of spread: relative positions, after the agent's own four numbers."""
    n = env.num_agents
    return EntityGroup(4, n, 2), EntityGroup(4 + 2 * n, n - 1, 2)


def _particles(place: str, won: Callable[[Any, State], Array], **more: Any) -> Rules:
    """Return the rules of a particle world (MPE); spread has as many landmarks as agents.

    MPE compares its step counter before incrementing it: with max_steps=25 it ends after 26.
    """

    def chosen(module: Any, options: Options) -> dict[str, Any]:
        limit = {"max_steps": PARTICLE_STEPS - 1}
        if "num_agents" not in options:
            return limit
        n = int(options["num_agents"])
        return {**limit, "num_agents": n, "num_landmarks": n}

    return Rules(f"mpe.{place}", chosen, lambda env: PARTICLE_STEPS, True, won, **more)


def _size(module: Any, options: Options) -> dict[str, Any]:
    return {"num_agents": int(options["num_agents"])}


def _layout(module: Any, options: Options) -> dict[str, Any]:
    return {"layout": module.layouts[options["layout"]]}


def _layout_name(module: Any, options: Options) -> dict[str, Any]:
    return {"layout": options["layout"]}


def _limit(env: Any) -> int:
    return int(env.max_steps)


RULES: dict[str, Rules] = {
    "MPE_simple_spread_v3": _particles(
        "simple_spread.SimpleSpreadMPE", _every_landmark, entities=_landmarks_and_others
    ),
    "MPE_simple_reference_v3": _particles("simple_reference.SimpleReferenceMPE", _own_landmarks),
    "MPE_simple_speaker_listener_v4": _particles(
        "simple_speaker_listener.SimpleSpeakerListenerMPE", _listener_at_goal
    ),
    "switch_riddle": Rules(
        "switch_riddle.switch_riddle.SwitchRiddle", _size, _limit, timed=False, won=_rewarded
    ),
    "overcooked": Rules(
        "overcooked.overcooked.Overcooked", _layout, _limit, timed=True, won=_rewarded
    ),
    "overcooked_v2": Rules(
        "overcooked_v2.overcooked.OvercookedV2", _layout_name, _limit, timed=True, won=_rewarded
    ),
    "hanabi": Rules("hanabi.hanabi.HanabiEnv", _size, _longest_hanabi, timed=False, won=_perfect),
}


# ---- building a world ------------------------------------------------------------------------


def _options(game: str, query: str) -> Options:
    """Return the options of a query such as `layout=coord_ring`, with defaults for the others."""
    known = JAXMARL_GAMES[game].options
    options = {name: values[0] for name, values in known.items()}
    for name, value in arguments.parse(query).items():
        if not known:
            raise UsageError(f"jaxmarl:{game} has no options; remove '{name}={value}'")
        if name not in known:
            raise unknown(f"option of jaxmarl:{game}", name, known)
        if value not in known[name]:
            raise unknown(name, value, known[name])
        options[name] = value
    return options


def _environment(world_id: str, rules: Rules, options: Options) -> Any:
    """Build JaxMARL's environment without its output and without importing the other worlds."""
    path, _, name = rules.place.rpartition(".")
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Overcooked recommends v2
        try:
            with isolated_import(f"jaxmarl.environments.{path}"):
                module = importlib.import_module(f"jaxmarl.environments.{path}")
        except ImportError as missing:
            package = missing.name or missing
            raise UsageError(
                f"world '{world_id}' needs the Python package '{package}', which is not installed"
            ) from missing
        return getattr(module, name)(**rules.arguments(module, options))


def strongly_typed(state: Any) -> Any:
    """Make weak types strong: JaxMARL has them at reset only, which a compiled loop rejects."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=jnp.asarray(x).dtype), state)


def _freeze(over: Array, after: Any, before: Any) -> Any:
    """Keep the state of a game that is over: Hanabi's would run out of legal moves."""
    return jax.tree.map(lambda x, y: jnp.where(over, y, x), after, before)
