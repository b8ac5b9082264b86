"""Write a recording to a file: an animation (gif, mp4), a web page (html), or the data (json)."""

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

Progress = Callable[[int, int], None]  # images drawn, total

STEP_SECONDS = 0.32  # display time of a step
LAST_SECONDS = 2.4  # and of the end
GIF_IMAGES, MP4_IMAGES = 4, 8  # per step of a field
MP4_SCALE = 1.5  # resolution relative to a gif


def checked(path: Path) -> Path:
    """Return `path` if its format can be written; called before an episode is played."""
    if path.suffix not in WRITERS:
        formats = ", ".join(WRITERS)
        raise unknown("format", path.suffix or path.name, WRITERS, f"--out ends in {formats}.")
    if path.suffix == ".mp4" and not importlib.util.find_spec("imageio_ffmpeg"):
        raise UsageError(
            f"{path} needs ffmpeg; run `pip install 'pevdn[video]'`, or draw a .gif or .html."
        )
    return path


def draw(recording: Recording, path: Path, progress: Progress) -> None:
    """Write the file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            WRITERS[path.suffix](recording, draft, progress)
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror or problem}.") from None


def _images(
    recording: Recording, per_step: int, scale: float, progress: Progress
) -> Iterator[np.ndarray]:
    """Yield images (height, width, 3) of uint8 in order."""
    from pevdn.viewer.picture import Painter

    painter = Painter(recording, scale)
    total = len(recording.steps) * per_step + 1
    for number in range(total):
        yield painter.at(number / per_step)
        progress(number + 1, total)


def _per_step(recording: Recording, smooth: int) -> int:
    return smooth if recording.scene["kind"] == "field" else 1


def _gif(recording: Recording, path: Path, progress: Progress) -> None:
    from PIL import Image

    per_step = _per_step(recording, GIF_IMAGES)
    images = [Image.fromarray(pixels) for pixels in _images(recording, per_step, 1, progress)]
    # One palette for all images: unchanged pixels then cost nothing.
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
        optimize=False,  # keeps the common palette
    )


def _mp4(recording: Recording, path: Path, progress: Progress) -> None:
    import imageio_ffmpeg

    per_step = _per_step(recording, MP4_IMAGES)
    images = _images(recording, per_step, MP4_SCALE, progress)
    first = next(images)
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
        # JAX warns of forks that continue in Python; this one executes ffmpeg at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        video.send(None)
    image = first
    for image in itertools.chain([first], images):
        video.send(np.ascontiguousarray(image))
    for _ in range(round(LAST_SECONDS * rate)):
        video.send(np.ascontiguousarray(image))
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
