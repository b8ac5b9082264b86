"""Files: a crash leaves the old content or the new, and nothing is overwritten by accident."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pevdn.errors import PevdnError
from pevdn.storage import files


class Crash(BaseException):
    """Ends a write as abruptly as a killed process does."""


def crash(*_: Any) -> None:
    raise Crash


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- replaced files ----------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    files.write_atomically(path, "old and longer")
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(tmp_path) == ["status.json"]


@pytest.mark.parametrize(("owner", "step"), [(os, "fsync"), (Path, "replace")])
def test_a_crash_between_write_and_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    path = tmp_path / "status.json"
    files.write_atomically(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, crash)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans up nothing
        with pytest.raises(Crash):
            files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert files.draft_of(path).read_text() == "new"
    files.write_atomically(path, "newer")  # over the draft that was left behind
    assert path.read_text() == "newer"
    assert names_in(tmp_path) == ["status.json"]


def test_the_content_is_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (steps.append("fsync"), fsync(number)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    files.write_atomically(tmp_path / "status.json", "text")
    assert steps == ["fsync", "replace"]


def test_a_block_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as draft:
        assert draft.suffix == ".png" and draft.parent == path.parent
        draft.write_text("half")
        _ = 1 / 0
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["curve.png"]


# --- appended files ----------------------------------------------------------------------------


def test_what_is_appended_is_on_the_disk_and_nothing_before_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "lines", list[bytes]()
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(path.read_bytes()))
    files.append(path, "one\n")
    files.append(path, b"two\n")
    assert synced == [b"one\n", b"one\ntwo\n"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", []), ("a\n", ["a\n"]), ("a\nb", ["a\n"]), ("a", []), ("a\nb\n", ["a\n", "b\n"])],
)
def test_an_incomplete_last_line_is_not_read(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = tmp_path / "lines"
    path.write_text(text)
    assert files.whole_lines(path) == lines


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert files.whole_lines(tmp_path / "lines") == []


# --- new files ---------------------------------------------------------------------------------


def test_create_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    files.create(path, b"first", 0o600)
    with pytest.raises(FileExistsError):
        files.create(path, b"second", 0o600)
    assert path.read_bytes() == b"first"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")  # not through a link either
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "link", b"third", 0o600)
    assert not (tmp_path / "elsewhere").exists()


def test_a_created_file_has_its_mode_before_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened, modes = tmp_path / "secret", os.open, list[tuple[int, bytes]]()

    def watched(place: Any, *how: Any) -> int:
        number = opened(place, *how)
        if place == path:
            modes.append((mode_of(path), path.read_bytes()))
        return number

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0)
    try:
        files.create(path, b"content", 0o600)
    finally:
        os.umask(before)
    assert modes == [(0o600, b"")]
    assert (mode_of(path), path.read_bytes()) == (0o600, b"content")


def test_a_file_that_cannot_be_completed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.create(tmp_path / "secret", b"content", 0o600)
    assert names_in(tmp_path) == []


# --- directories -------------------------------------------------------------------------------


def test_a_private_directory_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    before = os.umask(0o777)
    try:
        for name in ("new", "empty"):
            files.make_private(tmp_path / name)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == mode_of(tmp_path / "empty") == 0o700


def test_a_directory_that_holds_something_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o755)
    (path / "file").touch()
    files.make_private(path)
    assert mode_of(path) == 0o755


def test_a_directory_is_locked_once_at_a_time(tmp_path: Path) -> None:
    with files.lock(tmp_path):
        second = files.lock(tmp_path)  # the lock belongs to the open file, not to the process
        with pytest.raises(PevdnError, match="being trained by another process; wait for it"):
            second.__enter__()
    with files.lock(tmp_path):
        pass


@pytest.mark.parametrize(
    ("number", "started", "sentence"),
    [
        (errno.ENOSPC, True, "no space left on the disk of .*; free some, then continue with `pev"),
        (errno.EDQUOT, False, "no space left on the disk of .*; free some, then train again"),
        (errno.EROFS, True, "cannot write to .*: Read-only file system"),
    ],
)
def test_a_disk_error_is_one_sentence_with_the_fix(
    tmp_path: Path, number: int, started: bool, sentence: str
) -> None:
    if started:
        (tmp_path / "config.yaml").touch()
    with pytest.raises(PevdnError, match=sentence), files.disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
