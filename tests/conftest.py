"""One torch thread and one seed for each test, so that runs repeat and workers do not compete for cores."""

from __future__ import annotations

import gc
import logging
import sys

import pytest
import torch

from cases import QUICK
from core import beyond_torch, needs_torch_alone
from quick import is_about, is_read
from suites import is_more, is_slow
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.kernels import cpu
from tokenmix.system.torchvision import ensure_torchvision

gc.disable()  # until the tests are collected: twenty thousand of them, and nothing of it is garbage
torch.set_num_threads(1)
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None  # keeping a seed for later records the stack, for milliseconds
ensure_torchvision()  # before a test file imports timm or transformers
logging.getLogger("torch.__trace").propagate = False  # it would add thousands of empty lines to failing tests


def pytest_addoption(parser):
    parser.addoption("--core", action="store_true", help="only the tests that need torch alone")


def pytest_configure():
    """Refuse to choose the tests of a mixer that does not exist."""
    if QUICK is not None and QUICK not in MIXERS:
        try:
            build_mixer(QUICK, 8)
        except MixerError as error:  # it names the nearest
            raise pytest.UsageError(f"TOKENMIX_QUICK: {error}") from None


def pytest_ignore_collect(collection_path, config):
    """Leave out the files that need an extra, with ``--core``, and those that say nothing of the mixer of QUICK."""
    name, is_file = collection_path.name, collection_path.suffix == ".py"
    core = config.getoption("core") and name in (*beyond_torch(), "browser")
    return True if core or QUICK is not None and is_file and not is_read(QUICK, name) else None


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


KERNEL_FILES = ("test_kernel", "test_sanitizers")
KERNEL_TESTS = ("test_cpu", "test_the_kernel_is_what_runs", "test_a_bug_in_a_kernel_is_noticed")


def _test(item):
    """The name of a test without its parameters, and these."""
    return getattr(item, "originalname", item.name), getattr(getattr(item, "callspec", None), "params", {})


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Mark what `make test` leaves to `make test-more`, and both to `make test-all`.

    Where the C library could not be built, deselect the tests of its kernels and say so in the summary.
    """
    if QUICK is not None:
        items[:] = [i for i in items if is_about(QUICK, i.path.name, *_test(i))]
    if config.getoption("core"):
        items[:] = [i for i in items if needs_torch_alone(i.path.name, _test(i)[0])]
    for item in items:
        name, params = _test(item)
        if is_more(item.path.name, name, params):
            item.add_marker("more")
        if is_slow(item.path.name, name, params):
            item.add_marker("slow")
    if not cpu.available():
        need = [i for i in items if i.path.name.startswith(KERNEL_FILES) or i.originalname in KERNEL_TESTS]
        config.hook.pytest_deselected(items=need)
        items[:] = [i for i in items if i not in need]
    items.sort(key=lambda i: i.get_closest_marker("timeout") is None)  # the longest first, so that workers end together


def pytest_collection_finish():
    gc.freeze()  # measuring memory collects garbage first, which need not look at the tests each time
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    if not cpu.available():
        terminalreporter.write_line(f"the tests of the C kernels were deselected: {cpu.why_not()}", yellow=True)


@pytest.fixture
def registry():
    """Forget the mixers that a test registers, which other tests would find."""
    before = dict(MIXERS)
    yield
    for name in set(MIXERS) - set(before):
        del MIXERS[name]


@pytest.fixture
def controls(registry):
    """The mixers of the controls, registered for one test only."""
    yield
    sys.modules.pop("controls", None)
