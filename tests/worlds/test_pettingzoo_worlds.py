"""Claims about PettingZoo's worlds: what a team sees of them, pays and loses nothing of."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pettingzoo")
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test

from pevdn import worlds
from pevdn.errors import PevdnError, UsageError
from pevdn.worlds.base import ExternalWorld, Step
from pevdn.worlds.external import problem_of
from pevdn.worlds.pettingzoo_worlds import ParallelEnvironment

SPREAD = "pettingzoo:mpe2.simple_spread_v3"
PONG = "pettingzoo:pettingzoo.butterfly.cooperative_pong_v6"
KNIGHTS = "pettingzoo:pettingzoo.butterfly.knights_archers_zombies_v11?max_cycles=200"


def played(adapter: Any, agents: Any, seed: int) -> list[Step]:
    """An episode of random available actions, of which every step is as promised."""
    draw = np.random.default_rng(seed)
    steps = [adapter.reset(seed)]
    while not steps[-1].done:
        assert problem_of(steps[-1], agents) is None and len(steps) < 1000
        masks = steps[-1].available
        steps.append(adapter.step(tuple(int(draw.choice(np.flatnonzero(m))) for m in masks)))
    assert problem_of(steps[-1], agents) is None
    return steps


def same(one: list[Step], two: list[Step]) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(x, y)
        for a, b in zip(one, two, strict=True)
        for x, y in zip(
            (*a.observations, *a.available, *a[2:]),
            (*b.observations, *b.available, *b[2:]),
            strict=True,
        )
    )


# --- real ones -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_id", "agents", "sees", "can", "steps"),
    [
        (SPREAD, 3, 18, 5, 25),
        (f"{SPREAD}?N=2&max_cycles=7", 2, 12, 5, 7),
        ("pettingzoo:mpe2.simple_reference_v3", 2, 21, 50, 25),
        ("pettingzoo:pettingzoo.sisl.pursuit_v5?max_cycles=4&n_pursuers=3", 3, 147, 5, 4),
        (f"{PONG}?max_cycles=3&render_mode=rgb_array", 2, 403200, 3, 3),
    ],
)
def test_a_real_environment_plays_as_it_says(
    world_id: str, agents: int, sees: int, can: int, steps: int
) -> None:
    world = worlds.make(world_id)
    assert isinstance(world, ExternalWorld) and world.name == world_id and world.max_workers is None
    assert [(a.observation_size, a.n_actions) for a in world.agents] == [(sees, can)] * agents
    assert world.max_steps == steps
    adapter = pickle.loads(pickle.dumps(world.build))()  # as in a process of its own
    episode = played(adapter, world.agents, 1)
    assert len(episode) - 1 == steps
    assert episode[-1].truncated and not episode[-1].won
    assert all(seen.any() for seen in episode[-1].observations)  # values are bootstrapped from it
    assert max(float(np.abs(o).max()) for s in episode for o in s.observations) < 10
    adapter.close()


def test_spread_pays_the_sum_and_repeats_itself_from_its_seed() -> None:
    world = worlds.make(SPREAD)
    adapter = world.build()
    one, other, again = (played(adapter, world.agents, seed) for seed in (3, 4, 3))
    assert same(one, again) and not same(one, other)
    adapter.reset(3)
    step = adapter.step((1, 2, 3))
    assert len(adapter.rewards) == 3
    assert step.reward == pytest.approx(sum(adapter.rewards.values()))
    mean = worlds.make(f"{SPREAD}?team-reward=mean").build()
    mean.reset(3)
    assert mean.step((1, 2, 3)).reward == pytest.approx(step.reward / 3)


def test_who_dies_among_the_zombies_sees_nothing_and_the_others_fight_on() -> None:
    world = worlds.make(KNIGHTS)
    adapter = world.build()
    gone = 0
    for seed in range(4):
        left: set[int] = set()
        for step in played(adapter, world.agents, seed):
            for i, (seen, open_) in enumerate(zip(step.observations, step.available, strict=True)):
                if i in left:
                    assert not seen.any() and open_.tolist() == [True] + [False] * 5
                elif open_.sum() == 1 and not step.done:
                    left.add(i)
        gone += len(left)
    assert gone > 0


def test_an_environment_for_drawing_renders_and_another_says_why_not() -> None:
    world = worlds.make(SPREAD)
    drawn, plain = world.build(drawn=True), world.build()
    drawn.reset(0), plain.reset(0)
    picture = drawn.render()
    assert picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8
    assert len(np.unique(picture)) > 1
    with pytest.raises(UsageError, match=r"cannot be drawn.*render_mode='rgb_array'"):
        plain.render()


def test_the_workers_of_a_world_need_no_jax_and_nothing_is_printed() -> None:
    code = (
        "import sys; from pevdn.worlds import make; world = make(sys.argv[1]); env = world.build()"
        "; env.reset(0); env.step((0,) * len(world.agents)); env.close(); "
        "assert 'jax' not in sys.modules"
    )
    command = [sys.executable, "-c", code, PONG]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# --- wrong ids -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_id", "message"),
    [
        ("pettingzoo:", "names no module; use an id such as 'pettingzoo:mpe2.simple_spread_v3'"),
        ("pettingzoo:nowhere", "needs the module nowhere, which is not installed nor in"),
        (
            "pettingzoo:pettingzoo.butterfly.knights_archers_zombies_v3",
            "did you mean 'pettingzoo.butterfly.knights_archers_zombies_v11'?",
        ),
        ("pettingzoo:json", "the module json has no parallel_env"),
        ("pettingzoo:pettingzoo.classic.tictactoe_v3", "turn-based (AEC).*aec_to_parallel"),
        (f"{SPREAD}?max_cycle=3", "'max_cycle'; did you mean 'max_cycles'?"),
        (f"{SPREAD}?crowd=3", "'crowd'; choose one of: N, benchmark_data, continuous_actions"),
        (f"{SPREAD}?N", "'N' in the id of a world is not of the form ARGUMENT=VALUE"),
        (f"{SPREAD}?N=two", "cannot be built: TypeError"),
        (f"{SPREAD}?continuous_actions=true", "agent 'agent_0' has continuous actions, Box"),
        (f"{SPREAD}?max-step=3", "'max-step'; did you mean 'max-steps'?"),
        (f"{SPREAD}?max-steps=0", "max-steps is '0', but must be a whole number above 0"),
        (f"{SPREAD}?team-reward=best", "'best'; choose one of: common, mean, sum"),
        (
            "pettingzoo:pettingzoo.sisl.pursuit_v5?evaders=3",
            "unknown argument of pettingzoo.sisl.pursuit_v5 'evaders'; did you mean 'n_evaders'?",
        ),
    ],
)
def test_a_wrong_id_says_what_would_be_right(world_id: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        worlds.make(world_id)
    for part in message.split(".*"):
        assert part in str(caught.value)


def test_a_module_of_the_folder_is_found_and_what_is_wrong_in_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("broken_own_world.py").write_text("parallel_env = 1 / 0")
    with pytest.raises(UsageError, match="importing broken_own_world raised ZeroDivisionError"):
        worlds.make("pettingzoo:broken_own_world")
    Path("needy_own_world.py").write_text("import not_there_at_all")
    with pytest.raises(UsageError, match="needs the Python package not_there_at_all; install it"):
        worlds.make("pettingzoo:needy_own_world")


# --- any kind of environment -----------------------------------------------------------------

SEEN: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(0, 255, (2, 2, 3), np.uint8),
    spaces.Discrete(4),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2, 2)))),
    spaces.Dict({"here": spaces.Box(0, 1, (1,)), "there": spaces.MultiBinary(2)}),
]
SIZES = [3, 12, 4, 5, 3, 6, 3]
DONE: list[spaces.Space[Any]] = [
    spaces.Discrete(3),
    spaces.Discrete(4, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(2),
]
CHOICES = [3, 4, 6, 4]
MASKS = ("none", "observation", "info")


class Strange(ParallelEnv[str, Any, Any]):
    """Unlike agents that leave at times fixed beforehand, and notes of what reached it.

    `kinds` are (observation, action, mask) of each agent, as places in the lists above; `leaves`
    the step after which each is terminated, `clock` the one after which the rest is truncated.
    """

    metadata = {"name": "strange"}  # noqa: RUF012
    render_mode = None

    def __init__(self, kinds: list[tuple[int, int, str]], leaves: list[int], clock: int) -> None:
        self.possible_agents = [f"a{i}" for i in range(len(kinds))]
        self.agents: list[str] = []
        self.max_cycles = clock
        self.leaves = dict(zip(self.possible_agents, leaves, strict=True))
        self.masks = {a: kind[2] for a, kind in zip(self.possible_agents, kinds, strict=True)}
        self.seen, self.done = {}, {}
        for agent, (seen, done, mask) in zip(self.possible_agents, kinds, strict=True):
            self.done[agent] = DONE[done]
            hidden = spaces.MultiBinary(CHOICES[done])
            masked = spaces.Dict({"observation": SEEN[seen], "action_mask": hidden})
            self.seen[agent] = masked if mask == "observation" else SEEN[seen]
        self.choices = {a: CHOICES[k[1]] for a, k in zip(self.possible_agents, kinds, strict=True)}

    def observation_space(self, agent: str) -> Any:
        return self.seen[agent]

    def action_space(self, agent: str) -> Any:
        return self.done[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t, self.got = self.possible_agents[:], 0, []
        for number, space in enumerate(self.seen.values()):
            space.seed(None if seed is None else seed + number)
        return self._show(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        self.got.append(actions)
        playing = self.agents
        over = {a: self.t >= self.leaves[a] for a in playing}
        late = {a: self.t >= self.max_cycles for a in playing}
        paid = {a: float(i + 1) for i, a in enumerate(self.possible_agents) if a in playing}
        self.agents = [a for a in playing if not (over[a] or late[a])]
        seen, infos = self._show(playing)
        return seen, paid, over, late, infos

    def mask(self, agent: str) -> np.ndarray:
        mask = np.zeros(self.choices[agent], np.int8)
        mask[self.t % len(mask) :] = 1
        return mask

    def _show(self, agents: list[str]) -> Any:
        self.shown, infos = {}, {a: {} for a in agents}
        for agent in agents:
            self.shown[agent] = self.seen[agent].sample()
            if self.masks[agent] == "observation":
                self.shown[agent]["action_mask"] = self.mask(agent)
            if self.masks[agent] == "info":
                infos[agent] = {"action_mask": self.mask(agent)}
        return self.shown, infos


def read(space: Any, value: Any) -> np.ndarray:
    """What an observation should become, by gymnasium alone."""
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        return read(space["observation"], value["observation"])
    scale = 255 if isinstance(space, spaces.Box) and space.dtype == np.uint8 else 1
    return spaces.flatten(space, value).astype(np.float32) / scale


kinds = st.tuples(
    st.integers(0, len(SEEN) - 1), st.integers(0, len(DONE) - 1), st.sampled_from(MASKS)
)


@settings(max_examples=60)
@given(
    team=st.lists(st.tuples(kinds, st.integers(1, 7)), min_size=1, max_size=4),
    clock=st.integers(1, 6),
    seed=st.integers(0, 2**31 - 9),
)
def test_any_team_of_unlike_agents_that_leave_keeps_to_the_interface(
    team: list[tuple[tuple[int, int, str], int]], clock: int, seed: int
) -> None:
    env = Strange([kind for kind, _ in team], [leave for _, leave in team], clock)
    adapter = ParallelEnvironment(env, "strange")
    agents = adapter.agents
    assert [(a.observation_size, a.n_actions) for a in agents] == [
        (SIZES[seen], CHOICES[done]) for (seen, done, _), _ in team
    ]
    assert adapter.max_steps == clock
    draw = np.random.default_rng(seed)
    step, t = adapter.reset(seed), 0
    ends = min(clock, max(leave for _, leave in team))
    while True:
        assert problem_of(step, agents) is None
        for i, (name, ((_, _, mask), leave)) in enumerate(
            zip(env.possible_agents, team, strict=True)
        ):
            here = t < leave  # so it plays on, or only the clock has stopped it
            wanted = read(env.seen[name], env.shown[name]) if here else 0
            np.testing.assert_allclose(step.observations[i], wanted, rtol=1e-6)
            if here and mask != "none":
                assert step.available[i].tolist() == env.mask(name).astype(bool).tolist()
            elif here:
                assert step.available[i].all()
            else:
                assert step.available[i].tolist() == [True] + [False] * (len(env.mask(name)) - 1)
        assert bool(step.done) == (t == ends)
        if step.done:
            break
        actions = tuple(int(draw.choice(np.flatnonzero(m))) for m in step.available)
        step, t = adapter.step(actions), t + 1
        assert step.reward == sum(i + 1 for i, (_, leave) in enumerate(team) if t <= leave)
        sent = env.got[-1]
        assert set(sent) == {
            a for a, (_, leave) in zip(env.leaves, team, strict=True) if t <= leave
        }
        assert all(env.action_space(a).contains(action) for a, action in sent.items())
    assert bool(step.truncated) == any(leave > t for _, leave in team)
    assert not step.won


@pytest.mark.filterwarnings("ignore")
def test_the_strange_environments_are_pettingzoos() -> None:
    """What the property above is shown with passes PettingZoo's own test, agents leaving or not."""
    for leaves in ([9, 9, 9], [2, 4, 9]):
        parallel_api_test(Strange([(0, 0, "none"), (4, 1, "info"), (1, 2, "none")], leaves, 6), 30)


def test_every_combination_of_several_choices_is_one_action() -> None:
    env = Strange([(0, 2, "none"), (0, 3, "none")], [9, 9], 30)
    adapter = ParallelEnvironment(env, "strange")
    adapter.reset(0)
    for action in range(6):
        adapter.step((action, action % 4))
    first = [tuple(got["a0"].tolist()) for got in env.got]
    assert sorted(first) == [(i, j) for i in range(2) for j in range(3)]
    assert len({tuple(got["a1"].tolist()) for got in env.got}) == 4


# --- single rules ----------------------------------------------------------------------------


class Simple(ParallelEnv[str, Any, Any]):
    """Two agents; what a step answers is whatever the test says."""

    metadata = {"name": "simple"}  # noqa: RUF012
    max_steps = 5
    SEES, DOES = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self, **answers: Any) -> None:
        self.possible_agents = ["x", "y"]
        self.answers, self.closed = answers, 0

    def observation_space(self, agent: str) -> Any:
        return self.answers.get("sees", self.SEES)

    def action_space(self, agent: str) -> Any:
        return self.answers.get("does", self.DOES)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["x", "y"]
        return {a: np.zeros(2, np.float32) for a in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        print("a step")
        said = self.answers
        both = ("x", "y")
        return (
            said.get("seen", {a: np.ones(2, np.float32) for a in both}),
            said.get("paid", dict.fromkeys(both, 1.0)),
            said.get("over", dict.fromkeys(both, False)),
            said.get("late", dict.fromkeys(both, False)),
            said.get("infos", {a: {} for a in both}),
        )

    def close(self) -> None:
        self.closed += 1


def after_one_step(env: Simple, **how: Any) -> Step:
    adapter = ParallelEnvironment(env, "simple", **how)
    adapter.reset(0)
    return adapter.step((0, 0))


def test_a_common_reward_counts_once_and_differing_ones_are_refused() -> None:
    assert after_one_step(Simple()).reward == 2
    assert after_one_step(Simple(), team_reward="common").reward == 1
    unequal = Simple(paid={"x": 1.0, "y": 0.5})
    assert after_one_step(unequal).reward == 1.5
    with pytest.raises(UsageError, match=r"rewarded its agents differently .*'x' 1, 'y' 0.5.*sum"):
        after_one_step(unequal, team_reward="common")


@pytest.mark.parametrize("word", ["won", "battle_won", "is_success", "success"])
def test_a_victory_is_what_an_info_says_at_the_end(word: str) -> None:
    over = {"x": True, "y": True}
    infos = {"x": {word: False}, "y": {word: True}}
    assert after_one_step(Simple(over=over, infos=infos)).won
    assert not after_one_step(Simple(infos=infos)).won  # not over yet
    assert not after_one_step(Simple(over=over, infos={"x": {word: False}, "y": {}})).won


def test_an_end_is_a_truncation_if_the_clock_ended_it_for_all_that_were_left() -> None:
    def ended(x: str, y: str) -> tuple[bool, bool, list[bool]]:
        flags = {"over": {"x": "o" in x, "y": "o" in y}, "late": {"x": "l" in x, "y": "l" in y}}
        step = after_one_step(Simple(**flags))
        return bool(step.done), bool(step.truncated), [bool(o.any()) for o in step.observations]

    assert ended("", "") == (False, False, [True, True])
    assert ended("o", "") == (False, False, [False, True])
    assert ended("l", "") == (False, False, [False, True])
    assert ended("o", "o") == (True, False, [False, False])
    assert ended("l", "l") == (True, True, [True, True])
    assert ended("o", "l") == (True, True, [False, True])  # y is still worth something
    assert ended("ol", "o") == (True, False, [False, False])


def test_an_episode_that_does_not_end_is_truncated_at_max_steps() -> None:
    for how, longest in (({}, 5), ({"max_steps": 3}, 3)):
        adapter = ParallelEnvironment(Simple(), "simple", **how)
        for _ in range(2):
            steps = played(adapter, adapter.agents, 0)
            assert len(steps) - 1 == adapter.max_steps == longest
            assert steps[-1].truncated and all(o.any() for o in steps[-1].observations)


def test_what_an_environment_prints_stays_off_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    after_one_step(Simple())
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a step\n")


def test_who_is_there_and_gets_no_observation_is_named() -> None:
    with pytest.raises(PevdnError, match="returned no observation for 'y', which plays on"):
        after_one_step(Simple(seen={"x": np.ones(2)}))


def test_an_observation_is_not_changed_by_the_step_after_it() -> None:
    reused = {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}
    step = after_one_step(Simple(seen=reused))
    reused["x"][:] = 7
    assert step.observations[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"does": spaces.Box(-1, 1, (2,))}, "agent 'x' has continuous actions"),
        ({"does": spaces.MultiDiscrete([9, 9])}, "81 combinations.*at most 64"),
        ({"does": spaces.Text(3)}, "unsupported actions"),
        ({"sees": spaces.Sequence(spaces.Discrete(2))}, "without a fixed size"),
        ({"sees": spaces.Dict({"action_mask": spaces.MultiBinary(2)})}, "observes nothing"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(answers: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelEnvironment(Simple(**answers), "simple")


# --- objects ---------------------------------------------------------------------------------


def test_an_object_is_the_only_worker_and_is_left_open() -> None:
    env = Simple()
    world = worlds.adopt(env)
    assert isinstance(world, ExternalWorld)
    assert (world.name, world.max_workers, world.max_steps) == ("object:Simple", 1, 5)
    adapter = world.build()
    assert adapter.env is env and world.build() is adapter
    adapter.close()
    assert env.closed == 0
    assert worlds.adopt(env, max_steps=2, team_reward="mean").max_steps == 2


def test_a_factory_serves_any_number_of_workers() -> None:
    world = worlds.adopt(Simple)
    assert isinstance(world, ExternalWorld)
    assert (world.name, world.max_workers) == ("object:Simple", None)
    build = pickle.loads(pickle.dumps(world.build))
    one, two = build(), build(drawn=True)
    assert one.env is not two.env
    one.close()
    assert one.env.closed == 1


def test_a_name_and_max_steps_do_not_make_an_environment_a_world_in_jax() -> None:
    env = Simple()
    env.name = "simple"  # type: ignore[attr-defined]
    assert isinstance(worlds.adopt(env), ExternalWorld)


def test_worlds_and_ids_are_adopted_as_they_are() -> None:
    toy = worlds.make("toy:two-step")
    hosted = worlds.adopt(Simple())
    assert worlds.adopt("toy:two-step") is worlds.adopt(toy) is toy
    assert worlds.adopt(hosted) is hosted


def no_world() -> int:
    return 5


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (5, "5 is not a world: pass an id such as 'smax-sc2:3m', .*PettingZoo .*StarCraft2Env"),
        (
            lambda: Simple(),
            "cannot be pickled for worker processes .*define it at the top of",
        ),
        (no_world, "no_world returned 5, which is not a world"),
    ],
)
def test_what_is_no_world_is_told_what_one_is(env: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        worlds.adopt(env)


def test_an_object_that_plays_turn_by_turn_is_told_how_to_become_parallel() -> None:
    from pettingzoo.classic import tictactoe_v3

    with pytest.raises(UsageError, match=r"object:raw_env is turn-based .*aec_to_parallel"):
        worlds.adopt(tictactoe_v3.env())


def test_an_environment_that_does_not_say_how_long_it_is_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Simple, "max_steps")
    with pytest.raises(UsageError, match=r"states no episode limit.*max-steps=N"):
        worlds.adopt(Simple())
    assert worlds.adopt(Simple(), max_steps=4).max_steps == 4
