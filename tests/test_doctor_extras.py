"""`tokenmix doctor` uses each extra as its users do, and names what mends one that fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tokenmix.lab.cli as cli
from tokenmix.lab.cli import extras
from tokenmix.system.torchvision import reinstall_torchvision

BEYOND = "raise RuntimeError('operator torchvision::nms does not exist')\n"
LAZY = """
def __getattr__(name):
    try:
        import torchvision
    except RuntimeError as why:
        raise ModuleNotFoundError(f"Could not import module {name!r}.") from why
"""
WORDS = {"torchvision": BEYOND, "transformers": LAZY}


def planted(folder, monkeypatch, **packages):
    """Packages that stand before the installed ones in a process that begins now."""
    for name, text in packages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def only(monkeypatch, extra, use):
    monkeypatch.setattr(extras, "EXTRAS", {extra: (extras.EXTRAS[extra][0], use)})
    monkeypatch.setattr("tokenmix.lab.cli.doctor.EXTRAS", extras.EXTRAS)


def test_an_extra_that_works_is_ok(monkeypatch):
    monkeypatch.setattr(extras, "EXTRAS", {name: extras.EXTRAS[name] for name in ("train", "plot", "tensorboard")})
    assert extras.try_extras()[0] == {"train": "ok", "plot": "ok", "tensorboard": "ok"}


def test_a_torchvision_beyond_mending_is_to_be_installed_again(tmp_path, monkeypatch, capsys):
    planted(tmp_path, monkeypatch, **WORDS)
    only(monkeypatch, "hf", "import transformers; transformers.GPT2LMHeadModel")
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("BROKEN")]
    assert "extra hf: RuntimeError: operator torchvision::nms does not exist; torchvision was built for another" in line
    assert line.endswith(f"another torch: {reinstall_torchvision()}")
    assert "hf: transformers" in said
    assert "BROKEN, see below" in said
    ended = subprocess.run([sys.executable, "-c", "import tokenmix.hosts.torchvision"], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith(
        "tokenmix.errors.MixerError: torchvision cannot be imported (operator"
    )


def test_a_torchvision_that_one_line_mends_breaks_nothing(tmp_path, monkeypatch, capsys):
    needs = "import torch\nif not hasattr(torch.ops.torchvision, 'nms'): raise RuntimeError('torchvision::nms')\n"
    planted(tmp_path, monkeypatch, torchvision=needs)
    only(monkeypatch, "hf", "import torchvision")
    assert cli.main(["doctor"]) == 0, "tokenmix mends it for itself"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "torchvision" in line]
    assert line.startswith("note     torchvision was built for another torch, which tokenmix mends for itself")
    assert line.endswith(
        f"`import tokenmix.hosts.torchvision` before timm and transformers, or {reinstall_torchvision()}"
    )


def test_one_process_uses_all_extras(monkeypatch):
    """Each process imports torch again, which is most of what the doctor's time goes into."""
    begun = []
    start = subprocess.Popen.__init__
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *a, **k: (begun.append(a), start(*a, **k))[1])
    uses = {extra: (packages, "pass") for extra, (packages, _) in extras.EXTRAS.items()}
    monkeypatch.setattr(extras, "EXTRAS", uses)
    assert set(extras.try_extras()[0].values()) == {"ok"}
    assert len(begun) == 1


def test_an_extra_that_ends_the_process_leaves_the_others(monkeypatch):
    uses = {"train": "import os; os._exit(7)", "plot": "print('words'); 1 / 0", "hf": "import sys; sys.exit(3)"}
    monkeypatch.setattr(extras, "EXTRAS", {n: (("numpy",), use) for n, use in uses.items()} | {"text": ((), "pass")})
    found, note = extras.try_extras()
    assert found["train"].startswith("the process that used it ended with code 7; pip install")
    assert found["plot"].startswith("ZeroDivisionError: division by zero; pip")
    assert found["hf"].startswith("SystemExit: 3; pip")
    assert found["text"] == "ok"


def test_an_extra_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(extras, "EXTRAS", {"plot": ((), "import time; time.sleep(100)"), "text": ((), "pass")})
    monkeypatch.setattr(extras, "TORCHVISION", "pass")
    monkeypatch.setattr(extras, "SECONDS", 3)
    found, _ = extras.try_extras()
    assert found["plot"].startswith("using it takes more than 3 seconds")
    assert found["text"] == "ok"


def test_what_fails_for_one_reason_is_one_line(tmp_path, monkeypatch, capsys):
    planted(tmp_path, monkeypatch, torchvision=BEYOND)
    monkeypatch.setattr(extras, "EXTRAS", {extra: (("numpy",), "import torchvision") for extra in ("vision", "hf")})
    monkeypatch.setattr("tokenmix.lab.cli.doctor.EXTRAS", extras.EXTRAS)
    assert cli.main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BROKEN")]
    assert line.startswith(
        "BROKEN   extra vision, hf: RuntimeError: operator torchvision::nms does not exist; torchvision"
    )


def test_a_package_that_fails_otherwise_is_to_be_installed_again(monkeypatch):
    only(monkeypatch, "onnx", "import onnx_of_nobody")
    wanted = "ModuleNotFoundError: No module named 'onnx_of_nobody'; pip install --upgrade --force-reinstall"
    assert extras.try_extras()[0]["onnx"].startswith(wanted)


def test_an_extra_with_a_missing_package_is_not_tried(monkeypatch):
    monkeypatch.setattr(extras, "EXTRAS", {"plot": (("matplotlib", "nobody-has-this"), "import nobody")})
    assert extras.try_extras()[0] == {}


@pytest.mark.parametrize("extra", extras.EXTRAS)
def test_each_extra_is_that_of_the_package(extra):
    import tomllib
    from pathlib import Path

    listed = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    names = {each.split(">")[0] for each in listed}
    assert names - {"safetensors"} == set(extras.EXTRAS[extra][0]) - {"safetensors"}


def test_all_extras_are_tried_and_named_in_the_readme():
    import tomllib
    from pathlib import Path

    listed = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.EXTRAS) == set(listed) - {"all", "lab"}
    (line,) = [line for line in Path("README.md").read_text().splitlines() if line.startswith("`lab` ")]
    assert all(f"`{extra}`" in line for extra in extras.EXTRAS)
