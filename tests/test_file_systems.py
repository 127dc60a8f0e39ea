"""File systems that give no locks, do not flush, or rename no folder: what an error means is told by its number."""

from __future__ import annotations

import errno
import os
import stat
import warnings

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
        lock.locked(tmp_path, "another process is training"),
    ):
        assert lock.look(tmp_path) == (None, {"state": "running", "why": ""})
    with lock.alone(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_is_held_is_respected(tmp_path, monkeypatch, number):
    monkeypatch.setattr(lock.fcntl, "flock", raising(number))
    with (
        pytest.raises(MixerError, match="another process is training"),
        lock.locked(tmp_path, "another process is training"),
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
    with pytest.raises(OSError, match=os.strerror(number)), lock.locked(tmp_path, "busy"):
        pass
    assert lock.look(tmp_path)[0] is None


@pytest.mark.parametrize("number", GONE)
def test_a_disk_that_is_gone_is_no_file_system_that_does_not_flush(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", raising(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write_file(tmp_path / "a", b"content")
