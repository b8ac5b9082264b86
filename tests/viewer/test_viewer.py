"""Claims about watching: a replay shows what was played, and every format holds all of it."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image
from support import PRIVATE, SMALL, cli

import pevdn
from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.policies.evaluate import evaluate
from pevdn.simulation.program import Simulation
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.directory import Run
from pevdn.training.evaluator import evaluation_keys
from pevdn.training.loop import Progress
from pevdn.viewer import Recording, drawing, playing, record_episode, styles
from pevdn.viewer.picture import Painter, rows
from pevdn.worlds.base import AgentSpec, ExternalWorld, Step
from pevdn.worlds.smax import STARCRAFT_UNITS


class Scripted:
    """A team that takes the last action open to it: in a battle an attack, else a walk."""

    def __init__(self, wishes: tuple[int, ...] = ()) -> None:
        self.wishes = wishes  # the actions preferred to the last, the best first
        self.q_values: Any = ()

    def reset(self) -> None: ...

    def __getitem__(self, i: int) -> Scripted:
        return self

    def act(self, observations: Any, available: Any) -> list[int]:
        self.q_values = np.arange(len(available[0]), dtype=float)
        chosen = []
        for mask in available:
            best = int(np.flatnonzero(mask)[-1])
            wished = [a for a in self.wishes if mask[a]]
            chosen.append(wished[0] if best == 4 and wished else best)
        return chosen


def played(world_id: str, policy: Scripted, q_values_of: int | None = None) -> Recording:
    source = playing.source_for(worlds.make(world_id), 0)
    parts = playing.play(source, policy, q_values_of)  # type: ignore[arg-type]
    return Recording(
        world_id, "scripted", "best", 0, 0, source.actions, q_values_of=q_values_of, **parts
    )


@pytest.fixture(scope="module")
def battle() -> Recording:
    """Walk east, then shoot."""
    return played("smax-sc2:3m", Scripted(wishes=(1,)), q_values_of=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("replay") / "run"
    return pevdn.train("pe-vdn-b", "toy:coordination", steps=60, out=out, **SMALL)


SEED = 1_234_567


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two private teams that have learnt nothing."""
    out = tmp_path_factory.mktemp("replay") / "private"
    settings = {**PRIVATE, "anchor": False}
    made = config.make("pe-vdn-c", "toy:coordination", 60, 2, SEED, settings)
    out.mkdir()
    (out / "config.yaml").write_text(config.to_text(made))
    simulation = Simulation(worlds.make(made.env), made)
    state = jax.jit(simulation.start)(jnp.arange(SEED, SEED + 2))
    checkpoints = Checkpoints(out, made)
    checkpoints.save(state._replace(episodes=jnp.ones(2, jnp.int32)), Progress(), simulation)
    checkpoints.close()
    return Run(out)


def shortened(recording: Recording, steps: int) -> Recording:
    return dataclasses.replace(recording, steps=recording.steps[:steps])


def frames_of(recording: Recording) -> list[dict[str, Any]]:
    return [recording.start, *(frame for step in recording.steps for frame in step.frames)]


# --- what was played -------------------------------------------------------------------------


def test_episodes_are_those_that_evaluate_plays(run: Run) -> None:
    shown = [record_episode(run, episode=k) for k in range(3)]
    (row,) = evaluate(run, episodes=3)
    assert np.mean([r.total_reward for r in shown]) == pytest.approx(row["return"])
    assert np.mean([r.won for r in shown]) == row["win_rate"]
    assert len({json.dumps(r.as_json()["start"]) for r in shown}) > 1


class Dice:
    """Three throws that pay what they show; the one agent has no choice."""

    name, max_steps, agents = "my:dice", 3, (AgentSpec(1, 1),)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Step]:
        return jnp.zeros((), jnp.int32), self._seen(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def step(self, key: jax.Array, state: jax.Array, actions: Any) -> tuple[jax.Array, Step]:
        return state + 1, self._seen(state + 1, jax.random.uniform(key))

    def _seen(self, thrown: jax.Array, reward: jax.Array) -> Step:
        no = jnp.zeros((), bool)
        return Step((jnp.zeros(1),), (jnp.ones(1, bool),), reward, thrown == 3, no, no)


def test_chance_within_an_episode_is_that_of_an_evaluation() -> None:
    wanted = config.make("pe-vdn-b", "toy:two-step", 10, settings={**SMALL, "eval_episodes": 2})
    simulation = Simulation(Dice(), wanted)
    learners = simulation.start(jnp.arange(1)).learners
    keys = evaluation_keys(jnp.zeros(1, jnp.int32), 2**31 - 1)
    score = jax.jit(simulation.evaluate)(tuple(x.params for x in learners), keys)
    paid = [
        sum(
            step.reward
            for step in playing.play(playing.source_for(Dice(), k), Scripted(), None)["steps"]
        )  # type: ignore[arg-type]
        for k in range(2)
    ]
    assert np.mean(paid) == pytest.approx(float(score.total_reward[0]), abs=1e-5)


def test_the_same_episode_gives_the_same_recording(run: Run) -> None:
    assert record_episode(run, episode=3, q_values=1) == pevdn.replay(
        run.path, episode=3, q_values=1
    )


def test_q_values_are_of_the_agent_asked_for_alone(run: Run) -> None:
    shown = record_episode(run, q_values=1)
    for step in shown.steps:
        assert step.q_values is not None and step.available is not None
        assert len(step.q_values) == len(step.available) == 4  # agent 0 has three actions
        best = np.argmax(np.where(step.available, step.q_values, -np.inf))
        assert best == step.actions[1]
    assert all(step.q_values is None for step in record_episode(run).steps)


def test_health_is_lost_to_the_shots_that_are_shown(battle: Recording) -> None:
    bodies, seen = battle.scene["bodies"], frames_of(battle)
    damage = [STARCRAFT_UNITS[body["kind"]].damage for body in bodies]
    shots = 0
    for before, after in itertools.pairwise(seen):
        lost = np.zeros(len(bodies))
        for i, j in after["shots"]:
            gap = np.linalg.norm(np.subtract(before["at"][i], before["at"][j]))
            assert before["health"][i] > 0 and gap < bodies[i]["range"] + 0.01
            lost[j] += damage[i]
            shots += 1
        assert after["health"] == pytest.approx(np.maximum(np.subtract(before["health"], lost), 0))
    assert shots > 10 and min(seen[-1]["health"]) == 0
    assert battle.ending == ("won" if any(seen[-1]["health"][:3]) else "lost")


def test_names_of_actions_say_what_the_units_do(battle: Recording) -> None:
    names = [about["name"] for about in battle.actions[0]]
    assert names == [
        "north",
        "east",
        "south",
        "west",
        "stop",
        *(f"attack enemy {j}" for j in (0, 1, 2)),
    ]
    before, walked, fired = battle.start, set(), 0
    for step in battle.steps:
        for i, action in enumerate(step.actions):
            about, after = battle.actions[i][action], step.frames[-1]
            if "move" in about and before["health"][i]:
                way = np.subtract(after["at"][i], before["at"][i])
                assert way @ about["move"] > 1
                walked.add(about["name"])
            aims = {j for frame in step.frames for k, j in frame["shots"] if k == i}
            assert aims <= {about.get("target")}
            fired += bool(aims)
        before = step.frames[-1]
    assert walked == {"east"} and fired > 3


@pytest.mark.parametrize("action, way", enumerate(styles.NORTH_EAST_SOUTH_WEST))
def test_the_four_ways_are_the_compass(action: int, way: list[int], battle: Recording) -> None:
    env = worlds.make(battle.world)._env  # type: ignore[attr-defined]
    moved, _ = env._decode_discrete_actions(jnp.array([action]))
    assert np.allclose(moved[0], way, atol=1e-6)


def test_a_step_is_seen_tick_by_tick_up_to_where_it_ends(battle: Recording) -> None:
    world = worlds.make(battle.world)
    source = playing.source_for(world, 0)
    source.reset()
    source.step(battle.steps[0].actions)
    state = source._state.state  # type: ignore[attr-defined]
    assert len(battle.steps[0].frames) == 8
    assert np.allclose(battle.steps[0].frames[-1]["at"], state.unit_positions, atol=1e-3)
    gaps = np.diff([frame["at"][0] for frame in battle.steps[0].frames], axis=0)
    assert np.all(np.linalg.norm(gaps, axis=1) < 0.5)


def test_particles_go_where_their_actions_point() -> None:
    shown = played("jaxmarl:MPE_simple_spread_v3", Scripted())
    assert [body["kind"] for body in shown.scene["bodies"]] == ["agent"] * 3 + ["landmark"] * 3
    assert shown.actions[0][4] == {"name": "up", "move": [0, 1]}
    start, end = shown.start["at"], shown.steps[-1].frames[-1]["at"]
    # Agent 0 meets nobody; the other two bounce off each other.
    assert end[0][0] == start[0][0] and end[0][1] > start[0][1] + 1 and end[3:] == start[3:]
    assert shown.ending == "time is up"


@pytest.mark.parametrize(
    "world_id, first, says",
    [
        ("toy:two-step", "second", "game B"),
        ("jaxmarl:switch_riddle", "tell", "light"),
        pytest.param("jaxmarl:hanabi", "hint", "lives 3", marks=pytest.mark.slow),
    ],
)
def test_other_worlds_are_tables_of_what_was_chosen(world_id: str, first: str, says: str) -> None:
    shown = played(world_id, Scripted())
    chosen = [shown.actions[i][a]["name"] for i, a in enumerate(shown.steps[0].actions)]
    assert shown.scene == {"kind": "table"} and any(name.startswith(first) for name in chosen)
    assert says in shown.steps[0].frames[-1]["text"]
    assert Painter(shown).at(len(shown.steps)).std() > 5


@pytest.mark.slow
@pytest.mark.parametrize("world_id", ["jaxmarl:overcooked", "jaxmarl:overcooked_v2"])
def test_kitchens_are_pictures(world_id: str) -> None:
    pytest.importorskip("imageio")
    source = playing.source_for(worlds.make(world_id), 0)
    source.reset()
    source.step([0, 0])
    before = source.frames[0]["png"]
    source.step([1, 1])
    assert source.frames[0]["png"] != before
    assert Image.open(io.BytesIO(base64.b64decode(before))).width > 100


# --- worlds outside of JAX -------------------------------------------------------------------


class Lamp:
    """Two agents and a lamp, of the sizes of `toy:coordination`; it is over after two steps."""

    def __init__(self) -> None:
        self.light, self.closed = 0, False

    def reset(self, seed: int) -> Step:
        self.light = seed % 200
        return self._step(0, False)

    def step(self, actions: tuple[int, ...]) -> Step:
        self.light += 10
        return self._step(1.0, self.light >= 220 or actions == ())

    def _step(self, reward: float, done: bool) -> Step:
        seen = tuple(np.zeros(k, np.float32) for k in (5, 6))
        masks = tuple(np.ones(k, bool) for k in (3, 4))
        return Step(seen, masks, reward, done, False, False)  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True


class DrawnLamp(Lamp):
    def render(self) -> np.ndarray:
        return np.full((20, 30, 3), self.light, np.uint8)


def test_a_world_that_draws_itself_is_shown_as_it_does(run: Run, tmp_path: Path) -> None:
    agents, copy = worlds.make("toy:coordination").agents, DrawnLamp()
    asked = []

    def build(drawn: bool = False) -> DrawnLamp:
        asked.append(drawn)
        return copy

    world = ExternalWorld("toy:coordination", agents, 30, build)
    shown = pevdn.replay(run, tmp_path / "lamp.gif", env=world)
    pictures = [Image.open(io.BytesIO(base64.b64decode(v["png"]))) for v in frames_of(shown)]
    lights = [np.asarray(picture)[0, 0, 0] for picture in pictures]
    assert asked == [True] and copy.closed and pictures[0].size == (30, 20)
    assert np.all(np.diff(np.asarray(lights, int)) == 10) and lights[-1] >= 220
    assert Image.open(tmp_path / "lamp.gif").n_frames == len(shown.steps) + 1


def test_a_world_that_does_not_draw_itself_is_a_table(run: Run) -> None:
    world = ExternalWorld("toy:coordination", worlds.make("toy:coordination").agents, 30, Lamp)
    shown = record_episode(run, env=world)
    assert shown.scene == {"kind": "table"}
    assert shown.actions[1][3]["name"] == "action 3" and shown.total_reward == len(shown.steps)


# --- drawing ---------------------------------------------------------------------------------


def test_a_shot_is_drawn_when_it_is_fired_and_not_before(battle: Recording) -> None:
    first = next(t for t, step in enumerate(battle.steps) if any(v["shots"] for v in step.frames))
    peaceful = [
        dataclasses.replace(step, frames=[{**frame, "shots": []} for frame in step.frames])
        for step in battle.steps
    ]
    war, peace = Painter(battle), Painter(dataclasses.replace(battle, steps=peaceful))
    tick = next(k for k, v in enumerate(battle.steps[first].frames) if v["shots"])
    assert np.array_equal(war.at(first + tick / 8), peace.at(first + tick / 8))
    assert not np.array_equal(war.at(first + (tick + 1) / 8), peace.at(first + (tick + 1) / 8))


def test_frames_between_steps_move_smoothly(battle: Recording) -> None:
    painter = Painter(battle)
    _, start = painter._now(0.0)
    _, middle = painter._now(0.5)
    _, end = painter._now(1.0)
    assert np.allclose(start["at"], battle.start["at"])
    assert np.allclose(middle["at"], battle.steps[0].frames[3]["at"])
    assert np.allclose(end["at"], battle.steps[0].frames[-1]["at"])


def test_a_gif_has_every_step_and_is_small(battle: Recording, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    drawing.draw(
        shortened(battle, 3), tmp_path / "b.gif", lambda done, total: heard.append((done, total))
    )
    with Image.open(tmp_path / "b.gif") as gif:
        assert gif.n_frames == 3 * drawing.GIF_IMAGES + 1  # type: ignore[attr-defined]
        assert gif.size == (1000, 580)
    assert heard[-1] == (13, 13) and (tmp_path / "b.gif").stat().st_size < 500_000
    assert [path.name for path in tmp_path.iterdir()] == ["b.gif"]


def test_an_mp4_plays_anywhere(battle: Recording, tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    drawing.draw(shortened(battle, 1), tmp_path / "b.mp4", lambda done, total: None)
    about = next(ffmpeg.read_frames(tmp_path / "b.mp4"))
    assert about["codec"] == "h264" and about["pix_fmt"].startswith("yuv420p")
    assert about["size"] == (1500, 870) and about["duration"] == pytest.approx(2.72, abs=0.2)


def test_a_page_holds_the_whole_recording_and_asks_for_nothing(
    battle: Recording, tmp_path: Path
) -> None:
    path = tmp_path / "b.html"
    evil = dataclasses.replace(battle, world="</script><script>alert(1)")
    drawing.draw(evil, path, lambda done, total: None)
    page = path.read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (line,) = re.findall(r"^const R = (.*);$", script, re.MULTILINE)
    assert json.loads(line) == json.loads(json.dumps(evil.as_json()))
    assert "http:" not in page and "https:" not in page and "default-src 'none'" in page
    if node := shutil.which("node"):
        (tmp_path / "b.js").write_text(script)
        subprocess.run([node, "--check", tmp_path / "b.js"], check=True)


def test_of_many_actions_the_best_that_are_open_are_shown() -> None:
    values, available = [float(-a) for a in range(50)], [a % 2 == 0 for a in range(50)]
    assert rows(values, available) == list(range(0, 40, 2))
    assert rows([1.0, 2.0], [True, False]) == [0, 1]


# --- the seed of a private run ---------------------------------------------------------------


def drawn_texts(recording: Recording) -> str:
    """All that a painter writes into a frame."""
    painter = Painter(recording, 1)
    painter.at(0)
    return " ".join(x.get_text() for x in painter._figure.findobj(Text))


def test_no_picture_page_or_recording_of_a_private_run_tells_its_seed(
    private: Run, tmp_path: Path
) -> None:
    page, plain = tmp_path / "b.html", tmp_path / "b.json"
    said = cli("replay", private.path, "--json", "--seed", SEED + 1, "--out", page)
    document = json.loads(said.out)
    recording = pevdn.replay(private, plain, seed=SEED + 1)
    assert document["lane"] == recording.lane == 1
    assert "seed" not in document and recording.seed is None
    texts = [page.read_text(), plain.read_text(), said.out, drawn_texts(recording)]
    for text in texts:
        assert text and str(SEED) not in text and str(SEED + 1) not in text
    assert '"lane": 1' in texts[1] and "team 1" in texts[3]
    assert record_episode(private).lane == 0
    if node := shutil.which("node"):
        (script,) = re.findall(r"^const which = .*$", texts[0], re.MULTILINE)
        program = f"const R = {texts[1]}; {script} console.log(which)"
        told = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
        assert told.stdout == "team 1\n"


def test_a_run_without_privacy_tells_its_seed_as_before(run: Run) -> None:
    recording = record_episode(run)
    document = recording.as_json()
    assert (recording.seed, recording.lane) == (0, None)
    assert document["seed"] == 0 and "lane" not in document and "seed 0" in drawn_texts(recording)
    assert json.loads(cli("replay", run.path, "--json").out)["seed"] == 0


# --- the command -----------------------------------------------------------------------------


def test_the_command_draws_and_reports(run: Run) -> None:
    said = cli("replay", run.path, "--q-values", 0, "--json")
    document = json.loads(said.out)
    assert said.code == 0 and document["out"] == str(run.path / "replay.html")
    assert document["bytes"] == (run.path / "replay.html").stat().st_size
    assert document["steps"] == 3 and document["return"] == record_episode(run).total_reward
    assert '"q_values_of":0' in (run.path / "replay.html").read_text()


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--out", "a.avi"], r"unknown format '\.avi'.*\.html, \.gif, \.mp4, \.json"),
        (["--q-values", "2"], "q_values is 2, but toy:coordination has agents 0 to 1"),
        (["--episode", "-1"], "episode is -1"),
        (["--seed", "5"], "seed is 5"),
        (["--out", "/dev/null/a.html"], "/dev/null/a.html cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, options: list[str], sentence: str) -> None:
    said = cli("replay", run.path, *options)
    assert said.code == 2 and re.search(sentence, said.sentence) and said.out == ""


def test_without_ffmpeg_a_sentence_says_how_to_get_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pevdn.UsageError, match=re.escape("pip install 'pevdn[video]'")):
        pevdn.replay(run, tmp_path / "b.mp4")


def test_drawing_knows_nothing_of_jax(battle: Recording) -> None:
    plain = jax.tree.leaves(battle.as_json())
    assert {type(leaf) for leaf in plain} <= {str, int, float, bool}
    folder = Path(drawing.__file__).parent
    for name in ("drawing.py", "picture.py", "recording.py"):
        assert not re.search(r"import.*\bjax", (folder / name).read_text())
