"""``keep_memory``: fewer page faults, undone, never set by the import, set by the commands in their own process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

import tokenmix
from tokenmix.lab import cli
from tokenmix.lab.cli import entry
from tokenmix.lab.cli.doctor import diagnose, diagnosis_text
from tokenmix.system import malloc

SCRIPT = """
import resource, sys, torch, tokenmix
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.empty(64 << 18).fill_(1.0)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident():
    return int(open("/proc/self/statm").read().split()[1]) >> 8  # MiB
faults()
default = faults()
assert tokenmix.keep_memory()
faults()
print(default, min(faults() for _ in range(3)))  # the system may take pages back
print(resident())
tokenmix.keep_memory(False)
print(resident())
"""
glibc = pytest.mark.skipif(bool(malloc.why_not_kept()), reason=malloc.why_not_kept())


@glibc
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_blocks_are_used_again_until_it_is_undone():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    faults, kept, after = done.stdout.strip().splitlines()[0].split(), *done.stdout.split()[2:]
    assert int(faults[0]) > 5 * max(int(faults[1]), 1)
    assert int(kept) - int(after) > 32  # of the 64 MiB that were kept


class _Process:
    """The symbols of a process."""

    def __init__(self, *symbols: str):
        for symbol in symbols:
            setattr(self, symbol, lambda *_: pytest.fail("called"))


@pytest.mark.parametrize(
    ("symbols", "why"),
    [((), "no mallopt"), (("mallopt",), "no mallopt"), (("mallopt", "gnu_get_libc_version", "mallctl"), "jemalloc")],
)
def test_where_it_has_no_effect_the_doctor_says_why(symbols, why, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Process(*symbols))
    assert not tokenmix.keep_memory()
    assert not tokenmix.keep_memory(False)
    assert why in malloc.why_not_kept()


def test_the_doctor_says_whether_it_works():
    assert "memory   keep_memory()" in diagnosis_text(diagnose())


@pytest.mark.parametrize("verb", entry.KEEPING)
def test_commands_set_it_in_their_own_process_only(verb, monkeypatch):
    kept = []
    monkeypatch.setattr(entry, "keep_memory_here", lambda: kept.append(verb))
    monkeypatch.setattr(entry, "_parse", lambda *given: _Verb())
    arguments = [verb, "x"]
    assert cli.main(arguments) == 0
    assert kept == []
    monkeypatch.setattr(sys, "argv", ["tokenmix", *arguments])
    assert cli.main() == 0
    assert kept == [verb]


class _Verb:
    def run(self, *changes: object) -> int:
        return 0


def test_an_environment_that_sets_the_allocator_is_left_alone(monkeypatch):
    monkeypatch.setattr(malloc, "keep_memory", lambda: pytest.fail("set"))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    malloc.keep_memory_here()


@glibc
def test_processes_that_a_command_starts_inherit_it(monkeypatch):
    for name in malloc.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(malloc, "keep_memory", lambda: True)
    given: dict[str, str] = {}
    monkeypatch.setattr(malloc.os, "environ", given)
    malloc.keep_memory_here()
    assert given == malloc.ENVIRONMENT
