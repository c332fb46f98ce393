"""Checkpoints survive killed writers, several writers, and damaged files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.errors import UsageError
from stratagem.state import checkpoint, file_pair
from tests.clock import PATIENCE, in_time
from tests.state.ended_savings import check_plain, loaded, save, trained

ROOT = Path(__file__).parents[2]
LOCK = ".m.safetensors.lock"


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.state.ended_savings", str(folder), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen[str]) -> list[int]:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return [int(line) for line in out.split()]


@pytest.mark.timeout(60)
def test_an_ended_saving_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    endings = finish(start(tmp_path, "end"))
    assert len(endings) == 4 and min(endings) >= 5, endings


def test_nothing_is_moved_before_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power cut: each rename comes after a flush of all that it relies on."""
    done: list[tuple[str, str]] = []
    flush, move = os.fsync, os.replace

    def fsync(opened: int) -> None:
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{opened}")).name))
        flush(opened)

    def replace(source: Path, target: Path) -> None:
        done.append(("move", Path(target).name))
        move(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 1.0)
    commit, last = done.index(("move", "m.safetensors")), done.index(("move", "m.state.pt"))
    part = next(name for _, name in done if name.startswith("m.part-"))
    for needed in ("weights.safetensors", "state.pt", part, tmp_path.name):
        assert ("flush", needed) in done[:commit], done
    assert ("flush", tmp_path.name) in done[commit:last], done


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_two_savers_and_a_loader_of_one_name(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    save(folder, 0.0)
    *savers, loader = [start(folder, what) for what in ("0", "0.5", "load")]
    for each in (*savers, loader):
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in (*savers, loader):
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    assert [finish(each) for each in savers] == [[100], [100]]
    (tmp_path / "saved").touch()
    assert finish(loader)[0] >= 5
    value = loaded(folder)
    assert value is not None
    check_plain(folder, value)


# --- turns -------------------------------------------------------------------------------------


def test_a_saver_that_does_not_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_pair, "_LONG", 0.3)
    opened = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(opened, fcntl.LOCK_EX)
    began = time.monotonic()
    threading.Timer(1.0, os.close, [opened]).start()
    with caplog.at_level(logging.WARNING, "stratagem"):
        save(tmp_path, 1.0)
    in_time(time.monotonic() - began, 5.0, least=0.9)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and LOCK in told[0] and "end it" in told[0], told
    check_plain(tmp_path, 1.0)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"has no locks.*one process at a time"):
        save(tmp_path, 1.0)
    check_plain(tmp_path, 1.0)


def test_a_load_among_many_savings_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a slow disk saves overtake each read; then saves are kept out."""
    read, over, found = checkpoint._read_state, threading.Event(), list[float | None]()
    saved = 1

    def slowly(*args: Any) -> dict[str, Any]:
        """A reading among savings is overtaken by one; with the savers kept out, it is not."""
        until, before = time.monotonic() + 0.5, saved  # one of them may be at its end already
        while saved < before + 2 and time.monotonic() < until:
            time.sleep(0.01)
        return read(*args)

    def keep_saving() -> None:
        nonlocal saved
        while not over.wait(0.005):
            save(tmp_path, float(saved))
            saved += 1

    monkeypatch.setattr(checkpoint, "_read_state", slowly)
    save(tmp_path, 0.0)
    saver = threading.Thread(target=keep_saving)
    loader = threading.Thread(target=lambda: found.append(loaded(tmp_path)), daemon=True)
    with caplog.at_level(logging.INFO, "stratagem"):
        saver.start()
        loader.start()
        loader.join(PATIENCE)
        over.set()
        saver.join(PATIENCE)
    assert len(found) == 1 and "keeping others out" in caplog.text
    save(tmp_path, 1.0)
    check_plain(tmp_path, 1.0)


def test_a_folder_that_cannot_be_locked_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    files = file_pair.FilePair(tmp_path / "m.safetensors", tmp_path / "m.state.pt", lambda _: None)
    monkeypatch.setattr(file_pair, "_take", read_only)
    with files.undisturbed():
        assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems flush files alone; and what a file's flush says is an error."""
    flush, folders = os.fsync, True

    def fsync(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode) == folders:
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 1.0)
    check_plain(tmp_path, 1.0)
    folders = False
    with pytest.raises(OSError, match=r"could not be saved.*Invalid argument.*as it was"):
        save(tmp_path, 2.0)
    check_plain(tmp_path, 1.0)


# --- files that cannot be read -------------------------------------------------------------------


class Hostile:
    """Its pickle calls a function when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def hostile(path: Path) -> None:
    torch.save({"optimizer": Hostile(path.parent / "harm"), "value": 1.0}, path)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:16] = bytes(255 - byte for byte in content[:16])
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "halved": halved,
    "wrong magic": flipped,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no checkpoint at all\n"),
    "code": hostile,
    "bare pickle": lambda path: path.write_bytes(pickle.dumps(Hostile(path.parent / "harm"))),
    "a list": lambda path: torch.save([1, 2], path),
    "odd parts": lambda path: torch.save({"optimizer": 3, "extra_state": [4]}, path),
}


@pytest.mark.parametrize("name", ["m.state.pt", "m.safetensors"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_damaged_files_are_named(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    save(tmp_path, 1.0)
    damage(tmp_path / name)
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path)
    said = str(caught.value)
    assert str(tmp_path / name) in said and "whole copy" in said
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert "weights_only" not in said and not (tmp_path / "harm").exists()
    assert ("weights alone" in said) == (name == "m.state.pt")
    save(tmp_path, 2.0)  # and may be saved over
    check_plain(tmp_path, 2.0)


def test_a_number_that_is_a_path_leads_nowhere(tmp_path: Path) -> None:
    files = file_pair.FilePair(tmp_path / "m.safetensors", tmp_path / "m.state.pt", lambda _: None)
    (tmp_path / "m.part-x").mkdir()
    (tmp_path / "m.part-x" / "state.pt").touch()
    (tmp_path / "state.pt").touch()
    for number in ("x", "x/..", "", None):
        assert files.state_of(number) == files.state


def test_what_users_name_alike_is_left_alone(tmp_path: Path) -> None:
    """Only folders made by a save to this very name are removed."""
    for name in ("m.part-1", "m.part-0123456789abcdef0", "other.part-0123456789abcdef"):
        (tmp_path / name).mkdir()
    (tmp_path / "m.part-0123456789abcdef").mkdir()
    (tmp_path / "m.lock").touch()  # of another tool, as in poetry.lock
    save(tmp_path, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "m.lock",
        "m.part-0123456789abcdef0",
        "m.part-1",
        "m.safetensors",
        "m.state.pt",
        "other.part-0123456789abcdef",
    ]


def test_a_full_disk_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1.0)
    for name in ("save_file", "torch.save"):
        with monkeypatch.context() as patch:

            def full(*_: object) -> None:
                raise RuntimeError("unexpected pos 576 vs 534")  # as torch says it

            patch.setattr(f"stratagem.state.checkpoint.{name}", full)
            with pytest.raises(OSError, match=r"m\.safetensors could not be saved.*as it was"):
                save(tmp_path, 2.0)
        assert loaded(tmp_path) == 1.0
        check_plain(tmp_path, 1.0)


def test_what_fails_after_the_commit_is_told_and_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1.0)
    (tmp_path / "m.state.pt").unlink()
    (tmp_path / "m.state.pt" / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "stratagem"):
        save(tmp_path, 2.0)
    (part,) = tmp_path.glob("m.part-*")
    assert f"{part}, which a saving has left, cannot be moved" in caplog.text
    assert loaded(tmp_path) == 2.0
    with pytest.raises(OSError, match=rf"could not be saved: {part}, .*as it was"):
        save(tmp_path, 3.0)
    assert loaded(tmp_path) == 2.0
    (tmp_path / "m.state.pt" / "in the way").rmdir()
    (tmp_path / "m.state.pt").rmdir()
    save(tmp_path, 4.0)
    check_plain(tmp_path, 4.0)


ODD: dict[str, dict[Any, Any]] = {
    "an empty optimizer": {"optimizer": {}},
    "an odd optimizer": {"optimizer": {"state": 3, "param_groups": 4}},
    "a number as a name": {"extra_state": {3: 1}},
    "an odd key": {3: 1},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
def test_an_odd_state_is_named_before_anything_is_changed(
    tmp_path: Path, odd: dict[Any, Any]
) -> None:
    save(tmp_path, 1.0)
    torch.save(odd, tmp_path / "m.state.pt")
    module, optimizer = trained(-1.0)
    with pytest.raises(UsageError, match=r"m\.state\.pt is damaged.*weights alone"):
        checkpoint.load(tmp_path / "m", module, optimizer)
    for parameter in module.parameters():
        assert (parameter == -1.0).all()
        assert (optimizer.state[parameter]["momentum_buffer"] == -1.0).all()


def test_the_optimizer_of_another_model_is_told_before_anything_is_changed(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    module, _ = trained(-1.0)
    optimizer = torch.optim.SGD([module.get_parameter("weight")], lr=0.1)
    with pytest.raises(UsageError, match=r"m\.state\.pt does not fit.*group.*before compile"):
        checkpoint.load(tmp_path / "m", module, optimizer)
    assert all((parameter == -1.0).all() for parameter in module.parameters())
