"""From a recording to a file: a moving picture (gif, mp4), a page (html), or itself (json)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pevdn.errors import UsageError, unknown
from pevdn.storage.files import replacing
from pevdn.viewer.recording import Recording

Progress = Callable[[int, int], None]  # frames drawn, of how many

STEP_SECONDS = 0.32  # how long a step is shown
LAST_SECONDS = 2.4  # and the end
GIF_FRAMES, MP4_FRAMES = 4, 8  # pictures in one step of a field
MP4_SCALE = 1.5  # its pixels against those of a gif


def checked(path: Path) -> Path:
    """`path`, if something can be drawn there; asked before an episode is played."""
    if path.suffix not in WRITERS:
        formats = ", ".join(WRITERS)
        raise unknown("format", path.suffix or path.name, WRITERS, f"--out ends in {formats}.")
    if path.suffix == ".mp4" and not importlib.util.find_spec("imageio_ffmpeg"):
        raise UsageError(
            f"{path} needs ffmpeg; run `pip install 'pevdn[video]'`, or draw a .gif or .html."
        )
    return path


def draw(recording: Recording, path: Path, progress: Progress) -> None:
    """Write the file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            WRITERS[path.suffix](recording, draft, progress)
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror or problem}.") from None


def _frames(
    recording: Recording, per_step: int, scale: float, progress: Progress
) -> Iterator[np.ndarray]:
    """Pictures (height, width, 3) of uint8, in order."""
    from pevdn.viewer.picture import Painter

    painter = Painter(recording, scale)
    whole = len(recording.steps) * per_step + 1
    for number in range(whole):
        yield painter.at(number / per_step)
        progress(number + 1, whole)


def _per_step(recording: Recording, smooth: int) -> int:
    return smooth if recording.scene["kind"] == "field" else 1


def _gif(recording: Recording, path: Path, progress: Progress) -> None:
    from PIL import Image

    per_step = _per_step(recording, GIF_FRAMES)
    images = [Image.fromarray(f) for f in _frames(recording, per_step, 1, progress)]
    # One palette for all frames: what does not move then costs nothing.
    some = images[:: max(1, len(images) // 8)][:8] + images[-1:]
    sample = Image.fromarray(np.concatenate([np.asarray(image) for image in some]))
    palette = sample.quantize(128, Image.Quantize.MEDIANCUT)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    each = round(1000 * STEP_SECONDS / per_step)
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[each] * (len(images) - 1) + [round(1000 * LAST_SECONDS)],
        loop=0,
        optimize=False,  # a frame of fewer colours would need a palette of its own
    )


def _mp4(recording: Recording, path: Path, progress: Progress) -> None:
    import imageio_ffmpeg

    per_step = _per_step(recording, MP4_FRAMES)
    frames = _frames(recording, per_step, MP4_SCALE, progress)
    first = next(frames)
    rate = per_step / STEP_SECONDS
    video = imageio_ffmpeg.write_frames(
        path,
        first.shape[1::-1],
        fps=rate,
        codec="libx264",
        pix_fmt_out="yuv420p",
        macro_block_size=2,
        output_params=["-crf", "20", "-movflags", "+faststart"],
        ffmpeg_log_level="error",
    )
    with warnings.catch_warnings():
        # JAX fears a fork that goes on in Python; this one becomes ffmpeg at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        video.send(None)
    frame = first
    for frame in itertools.chain([first], frames):
        video.send(np.ascontiguousarray(frame))
    for _ in range(round(LAST_SECONDS * rate)):
        video.send(np.ascontiguousarray(frame))
    video.close()


def _html(recording: Recording, path: Path, progress: Progress) -> None:
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    text = json.dumps(recording.as_json(), separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(page.replace("/*RECORDING*/null", text), encoding="utf-8")


def _json(recording: Recording, path: Path, progress: Progress) -> None:
    path.write_text(json.dumps(recording.as_json()), encoding="utf-8")


WRITERS: dict[str, Callable[[Recording, Path, Progress], None]] = {
    ".html": _html,
    ".gif": _gif,
    ".mp4": _mp4,
    ".json": _json,
}
