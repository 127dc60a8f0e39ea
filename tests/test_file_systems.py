"""File systems that give no locks, do not flush, or rename no folder: what an error means is told by its number."""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
from pathlib import Path

import pytest

from tokenmix import MixerError
from tokenmix.lab.cli.host_folders import is_host_folder
from tokenmix.system import files, lock
from tokenmix.system.checkpoint import list_steps, save_checkpoint


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    monkeypatch.setattr(files, "UNFLUSHED", set())


def raising(number):
    def function(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return function


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_a_file_system_without_locks_is_told_once_and_holds_nobody_up(tmp_path, monkeypatch, number):
    monkeypatch.setattr(lock.fcntl, "flock", raising(number))
    with (
        pytest.warns(UserWarning, match="this file system gives no locks .*start only one"),
        lock.hold_lock(tmp_path, "another process is training"),
    ):
        assert lock.read_lock(tmp_path) == (None, {"state": "running", "why": ""})
    with lock.enter_alone(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_is_held_is_respected(tmp_path, monkeypatch, number):
    monkeypatch.setattr(lock.fcntl, "flock", raising(number))
    with (
        pytest.raises(MixerError, match="another process is training"),
        lock.hold_lock(tmp_path, "another process is training"),
    ):
        pass


def save(folder, step=1):
    return save_checkpoint(folder, step, {}, {"step": step})


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF])
@pytest.mark.parametrize("kind", [stat.S_ISDIR, stat.S_ISREG])
def test_a_file_system_that_does_not_flush_keeps_its_checkpoints(tmp_path, monkeypatch, number, kind):
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: raising(number)() if kind(os.fstat(f).st_mode) else real(f))
    with pytest.warns(UserWarning, match="does not flush to disk on request"):
        save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        files.write_json(tmp_path / "a.json", [1])
    assert list_steps(tmp_path) == [1]
    assert (tmp_path / "a.json").read_text() == "[\n  1\n]\n"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_what_may_be_lost_is_no_checkpoint(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", raising(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write_json(tmp_path / "a.json", [1])
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_in_a_lower_layer_of_an_overlay_is_replaced(tmp_path, monkeypatch):
    save(tmp_path)
    old, real = tmp_path / "step_00000001", os.rename
    (old / "mark").touch()
    monkeypatch.setattr(os, "rename", lambda a, b: raising(errno.EXDEV)() if a == old else real(a, b))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path)
    assert not (old / "mark").exists()
    assert list_steps(tmp_path) == [1]


def test_a_folder_that_may_not_be_read_is_not_taken_for_another_kind(tmp_path, monkeypatch):
    assert not is_host_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("pathlib.Path.read_text", raising(errno.EACCES))
    with pytest.raises(PermissionError):
        is_host_folder(tmp_path)


GONE = [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENOMEM]
"""The disk or the server is gone: no file system without locks or flushing says so."""


@pytest.mark.parametrize("number", GONE)
def test_a_disk_that_is_gone_is_no_file_system_without_locks(tmp_path, monkeypatch, number):
    monkeypatch.setattr(lock.fcntl, "flock", raising(number))
    with pytest.raises(OSError, match=os.strerror(number)), lock.hold_lock(tmp_path, "busy"):
        pass
    assert lock.read_lock(tmp_path)[0] is None


@pytest.mark.parametrize("number", GONE)
def test_a_disk_that_is_gone_is_no_file_system_that_does_not_flush(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", raising(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write_file(tmp_path / "a", b"content")


def half_written(out, said):
    with files.new_folder(out) as folder:
        (folder / "config.json").write_text("{}")
        raise KeyError(said)


@pytest.mark.parametrize("said", ["Error while serializing: I/O error: No space left on device (os error 28)", "None"])
def test_a_full_disk_is_one_line_whatever_library_wrote(tmp_path, said):
    """safetensors and tokenizers raise errors of their own; an error that is none of the disk's stays as it is."""
    expected = (MixerError, "cannot be written .No space left on device.; give") if "28" in said else (KeyError, said)
    with pytest.raises(expected[0], match=expected[1]):
        half_written(tmp_path / "out", said)
    assert list(tmp_path.iterdir()) == []


IN_PLACE = {
    "lab/report/taxonomy.py": "a page of the documentation",
    "lab/bench/bench_page.py": "a page of the documentation",
    "lab/papers/ours.py": "a page of the documentation",
    "lab/papers/__main__.py": "a page of the documentation",
    "testing/new_mixer.py": "a source of this library",
    "kernels/triton/aot.py": "a kernel built by its maintainers",
    "lab/hub/export.py": "inside of a folder that is written whole",
    "lab/train/rundir.py": "inside of a folder that is written whole",
    "system/machine.py": "a counter of the system",
}
"""Where a file is written in place, and what it is. A full disk leaves half of such a file, or an empty one."""


def test_users_files_are_written_whole():
    """`bench --json` and the pictures of sweeps and benchmarks were written in place."""
    package, writes = Path(files.__file__).parents[1], re.compile(r"\.write_(text|bytes)\(|\.savefig\((?!file\b)")
    found = {str(p.relative_to(package)) for p in package.rglob("*.py") if writes.search(p.read_text())}
    assert {name for name in found if "skeletons/" not in name} == set(IN_PLACE)
