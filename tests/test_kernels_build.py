"""Test the C library in a package: compiled into wheels and editable installs.

Where that fails the package does without it, and it is refused when it is stale or damaged.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from tokenmix.kernels import cpu
from tokenmix.kernels.cpu import build
from tokenmix.lab.cli.doctor import diagnose, diagnosis_text

ROOT = Path(__file__).parent.parent
PARTS = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore", "src")
LIBRARY = "tokenmix/kernels/cpu/libtokenmix.so"
TRY = """
import json, torch, tokenmix
from tokenmix import functional
from tokenmix.kernels import cpu
args = [torch.linspace(-3, 3, 2 * 70 * 5).reshape(2, 70, 5) + i for i in range(3)]
found = {"from": tokenmix.__file__, "isa": cpu.isa(), "why_not": cpu.why_not(), "error": None}
found["auto"] = bool(functional.aft_simple(*args).isfinite().all())
try:
    y = functional.aft_simple(*args, causal=True, backend="cpu")
    found["off"] = float((y - functional.aft_simple(*args, causal=True, backend="eager")).abs().max())
except tokenmix.MixerError as why:
    found["error"] = str(why)
print(json.dumps(found))
"""


def copy_of_project(place: Path, *, library: bool) -> Path:
    """What a wheel is built from, with the library that is built already or without."""
    place.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", *(() if library else ("*.so",)))
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(
            ROOT / part, place / part, **({"ignore": leave} if (ROOT / part).is_dir() else {})
        )
    return place


def environment(**more: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("TOKENMIX", "PYTHONPATH"))},
        "OMP_NUM_THREADS": "1",
        **more,
    }


def pip(*args: object, **more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=280)


def wheel(project: Path, **more: str) -> tuple[Path | None, str]:
    """The wheel, None if it failed, and what was said."""
    done = pip("wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", project / "dist", project, **more)
    made = list((project / "dist").glob("*.whl")) if done.returncode == 0 else []
    return (made[0] if made else None), done.stdout + done.stderr


def tried(place: Path, python: str = sys.executable, **more: str) -> dict:
    """What the package in ``place`` (a folder on the path) does with a forward pass, automatic and on backend="cpu"."""
    path = os.pathsep.join([str(place), *(p for p in sys.path if p.endswith("site-packages"))])
    done = subprocess.run(
        [python, "-c", TRY],
        env=environment(PYTHONPATH=path, **more),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check_whole(made: Path, place: Path) -> None:
    """Check a wheel for this platform only and any Python, with library and sources.

    Installed into an environment of its own, it runs its kernels.
    """
    assert made.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    names = zipfile.ZipFile(made).namelist()
    assert names.count(LIBRARY) == 1
    assert {f"tokenmix/kernels/cpu/src/{p.name}" for p in build.SOURCES.glob("*.[ch]")} <= set(names)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    python = place / "venv" / "bin" / "python"
    done = pip("--python", python, "install", "--no-deps", "--no-index", made)
    assert done.returncode == 0, done.stderr
    home = next((place / "venv" / "lib").glob("python*")) / "site-packages"
    found = tried(home, str(python))
    assert Path(found["from"]).is_relative_to(home)
    assert found["why_not"] is None
    assert found["isa"] in build.instruction_sets()
    assert found["off"] < 1e-5


def check_pure(made: Path | None, said: str, reason: str) -> None:
    """A wheel for any platform without a library, and the one line that says why."""
    assert made is not None, said
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert LIBRARY not in names
    assert "tokenmix/kernels/cpu/src/kernels.c" in names
    (line,) = [line for line in said.splitlines() if "warning: tokenmix is installed without its C kernels" in line]
    assert reason in line


def test_a_wheel_takes_a_library_that_is_current(tmp_path):
    made, said = wheel(copy_of_project(tmp_path / "project", library=True), CC="/bin/false")  # no need of a compiler
    assert made is not None, said
    check_whole(made, tmp_path)


@pytest.mark.slow
def test_a_wheel_compiles_its_library(tmp_path):
    project = copy_of_project(tmp_path / "project", library=False)
    made, said = wheel(project, TOKENMIX_BUILD_KERNELS="require")
    assert made is not None, said
    check_whole(made, tmp_path)


def test_a_failing_compiler_gives_a_working_package(tmp_path):
    made, said = wheel(copy_of_project(tmp_path / "project", library=False), CC="/bin/false")
    check_pure(made, said, "/bin/false")
    zipfile.ZipFile(made).extractall(tmp_path / "home")
    found = tried(tmp_path / "home")
    assert found["auto"]
    assert "was not built" in found["error"]
    assert build.COMMAND in found["error"]


def test_no_compiler_gives_a_package_without_kernels(tmp_path):
    made, said = wheel(copy_of_project(tmp_path / "project", library=False), PATH=str(tmp_path), CC="")
    check_pure(made, said, "no C compiler found")


def test_a_stale_library_is_not_packed(tmp_path):
    project = copy_of_project(tmp_path / "project", library=True)
    with (project / "src/tokenmix/kernels/cpu/src/aft_simple.c").open("a") as file:
        file.write("/* changed */\n")
    check_pure(*wheel(project, CC="/bin/false"), "/bin/false")


@pytest.mark.parametrize("choice", ["0", "require"])
def test_kernels_can_be_left_out_or_required(choice, tmp_path):
    made, said = wheel(
        copy_of_project(tmp_path / "project", library=False), CC="/bin/false", TOKENMIX_BUILD_KERNELS=choice
    )
    if choice == "require":
        assert made is None
        assert "`/bin/false" in said
    else:
        assert made is not None
        assert made.name.endswith("-py3-none-any.whl")
        assert "warning: tokenmix" not in said


def test_an_editable_install_uses_the_library_beside_the_sources(tmp_path, monkeypatch):
    """Test the hook by itself.

    What hatchling needs beside it for a whole editable install is on no machine without asking the network.
    """
    monkeypatch.syspath_prepend(ROOT)
    import hatch_build

    project = copy_of_project(tmp_path / "project", library=True)
    monkeypatch.setattr(hatch_build.KernelBuildHook, "root", str(project))
    monkeypatch.setattr(hatch_build.KernelBuildHook, "target_name", "wheel")
    monkeypatch.setenv("CC", "/bin/false")
    data: dict = {"pure_python": True, "force_include": {}}
    object.__new__(hatch_build.KernelBuildHook).initialize("editable", data)
    assert data == {"pure_python": False, "force_include": {}, "tag": f"py3-none-{hatch_build.platform_tag()}"}
    found = tried(project / "src")
    assert found["why_not"] is None
    assert found["off"] < 1e-5


def test_an_archive_of_the_sources_holds_what_compiling_needs(tmp_path):
    project = copy_of_project(tmp_path / "project", library=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist"],
        cwd=project,
        env=environment(),
        check=True,
        capture_output=True,
    )
    shutil.unpack_archive(next((project / "dist").glob("*.tar.gz")), tmp_path / "out")
    (out,) = (tmp_path / "out").iterdir()
    assert (out / "hatch_build.py").is_file()
    assert {p.name for p in (out / "src/tokenmix/kernels/cpu/src").iterdir()} == {
        p.name for p in build.SOURCES.iterdir()
    }
    assert not (out / "src" / LIBRARY).exists()


@pytest.fixture
def package(tmp_path):
    """A copy of the package to damage."""
    shutil.copytree(ROOT / "src" / "tokenmix", tmp_path / "tokenmix", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_stale_library_is_refused(package):
    with (package / "tokenmix/kernels/cpu/src/aft_simple.c").open("a") as file:
        file.write("/* changed */\n")
    found = tried(package)
    assert found["auto"]
    assert "stale" in found["error"]
    assert build.COMMAND in found["error"]


def test_a_library_that_was_cut_off_is_refused(package):
    library = package / LIBRARY
    whole = library.read_bytes()
    for part in (0.0, 1e-5, 0.1, 0.9, 0.9999, 0.5):
        library.write_bytes(whole[: int(part * len(whole))])
        assert not build.is_complete(library)
    found = tried(package)  # in a process of its own: loading it would kill this one
    assert found["auto"]
    assert "damaged" in found["error"]
    assert build.COMMAND in found["error"]


@pytest.fixture
def loading(tmp_path, monkeypatch):
    """cpu._load() on a library file of our own, beside the sources as they are."""
    file = tmp_path / "libtokenmix.so"
    monkeypatch.setattr(cpu, "LIBRARY", file)
    for name in ("TOKENMIX_LIBRARY", "TOKENMIX_ISA", "TOKENMIX_NO_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    return file


def test_a_file_that_is_no_library_is_refused(loading):
    assert "was not built" in cpu._load()[1]
    loading.write_text("x" * 5000)
    library, why = cpu._load()
    assert library is None
    assert "could not be loaded" in why
    assert build.COMMAND in why


def test_a_library_of_other_sources_is_taken_by_name_only(loading, monkeypatch):
    shutil.copy(build.LIBRARY, loading)
    assert cpu._load()[0] is not None
    monkeypatch.setattr(cpu, "source_hash", lambda: "0" * 16)
    assert "stale" in cpu._load()[1]
    monkeypatch.setenv("TOKENMIX_LIBRARY", str(loading))
    assert cpu._load()[0] is not None
    monkeypatch.setenv("TOKENMIX_LIBRARY", str(loading.parent / "none.so"))
    assert "none.so does not exist" in cpu._load()[1]


def test_an_unknown_instruction_set_is_refused(loading, monkeypatch):
    shutil.copy(build.LIBRARY, loading)
    monkeypatch.setenv("TOKENMIX_ISA", "v9")
    assert "TOKENMIX_ISA='v9'" in cpu._load()[1]
    monkeypatch.setenv("TOKENMIX_ISA", "base")
    assert cpu._load()[1] == "base"


def test_every_instruction_set_that_runs_here_gives_the_same(package):
    order = list(build.instruction_sets())
    for isa in order[order.index(cpu.isa()) :]:
        found = tried(package, TOKENMIX_ISA=isa)
        assert found["isa"] == isa
        assert found["off"] < 1e-5


def test_make_compiles_again_when_a_source_has_changed(tmp_path):
    project = copy_of_project(tmp_path / "project", library=True)
    shutil.copy(ROOT / "Makefile", project)
    (project / ".venv").mkdir()
    (project / ".venv/.ok").touch()
    (project / ".venv/bin").symlink_to(Path(sys.executable).parent)
    for source in [*project.glob("src/tokenmix/kernels/cpu/src/*"), *project.glob("src/tokenmix/kernels/cpu/*")]:
        os.utime(source, (1, 1))

    def plan() -> str:
        return subprocess.run(
            ["make", "-n", "-o", ".venv/.ok", "kernels"], cwd=project, check=True, capture_output=True, text=True
        ).stdout

    assert "build.py" not in plan()
    for name in ("src/aft_simple.c", "src/tm.h", "build.py"):
        os.utime(project / "src/tokenmix/kernels/cpu" / name)
        assert "build.py --if-needed" in plan()
        os.utime(project / "src/tokenmix/kernels/cpu" / name, (1, 1))
    run = [sys.executable, project / "src/tokenmix/kernels/cpu/build.py", "--if-needed"]
    assert (
        subprocess.run(run, env=environment(CC="/bin/false"), capture_output=True, text=True, check=True).stderr == ""
    )  # it is current
    (project / "src" / LIBRARY).unlink()
    assert (
        "slower"
        in subprocess.run(run, env=environment(CC="/bin/false"), capture_output=True, text=True, check=True).stderr
    )
    assert subprocess.run(run[:-1], env=environment(CC="/bin/false"), capture_output=True, text=True).returncode == 1


def test_flags_for_other_systems(monkeypatch):
    """Check what cannot be compiled here.

    macOS's clang takes OpenMP by another flag, clang on Linux brings its own runtime, Arm has one set of instructions.
    """
    monkeypatch.setattr(
        build.subprocess,
        "run",
        lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout="Apple clang version 17", stderr=""),
    )
    assert build.openmp(["cc"]) == (["-fopenmp"], ["-fopenmp"])
    monkeypatch.setattr(build.sys, "platform", "darwin")
    assert build.openmp(["cc"]) == (["-Xclang", "-fopenmp"], [])
    before = build.source_hash()
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    assert build.instruction_sets() == {"base": []}
    assert build.source_hash() != before
    monkeypatch.setattr(build.sys, "platform", "win32")
    with pytest.raises(build.BuildError, match="Linux or macOS"):
        build.build()


def test_the_tag_of_a_wheel_on_macos(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    import hatch_build

    monkeypatch.setattr(hatch_build.sys, "platform", "darwin")
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(hatch_build.platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
    assert hatch_build.platform_tag() == "macosx_14_0_arm64"
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "10.15")
    assert hatch_build.platform_tag() == "macosx_10_15_arm64"


def test_the_doctor_speaks_of_the_kernels():
    found = diagnose()
    kernels = found["kernels"]
    json.dumps(kernels)
    assert kernels["cpu"]["available"]
    assert kernels["cpu"]["hash"] == build.source_hash()
    assert "aft_simple" in kernels["cpu"]["operators"]
    assert not any(name.endswith("_backward") for name in kernels["cpu"]["operators"])
    lines = [line for line in diagnosis_text(found).splitlines() if line.startswith("kernels")]
    assert len(lines) == 2
    assert build.source_hash() in lines[0]
    assert f"({cpu.isa()})" in lines[0]
    assert torch.cuda.is_available() or "not in use" in lines[1]


def test_the_doctor_says_what_helps(monkeypatch):
    monkeypatch.setattr(cpu, "_loaded", False)
    monkeypatch.setattr(cpu, "_found", f"the C library is stale; build it again with `{build.COMMAND}`")
    monkeypatch.setattr(cpu, "_library", None)
    text = " ".join(diagnosis_text(diagnose()).split())
    assert f"C: not in use: the C library is stale; build it again with `{build.COMMAND}`" in text
    assert text.endswith("all well")  # nothing is broken without kernels


def test_huge_pages_are_asked_for_inside_large_results_only(monkeypatch):
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(cpu, "_madvise", lambda *a: asked.append(a))
    assert cpu.empty_result((3, 5), torch.bfloat16).shape == (3, 5)
    assert not asked
    a = cpu.empty_result((1025, 1024))
    ((start, size, _),) = asked
    assert start % mmap.PAGESIZE == 0
    assert a.data_ptr() <= start < a.data_ptr() + mmap.PAGESIZE
    assert start + size == a.data_ptr() + a.nbytes
