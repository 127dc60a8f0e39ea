"""Test the C kernels under gcc's sanitizers: every exported function, for two instruction sets.

The calls are recorded from the forms that use the functions. AddressSanitizer and UndefinedBehaviorSanitizer find what
is read or written outside of a buffer and what C leaves undefined; ThreadSanitizer finds blocks of work that touch the
same memory. A new kernel joins by being called: by a row of fuzz_forms.FORMS, or by a function of sanitizers/record.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_checks import structs
from tokenmix.kernels import cpu
from tokenmix.kernels.cpu import build

HERE = Path(__file__).parent
FOLDER = HERE / "sanitizers"
SANITIZERS = {
    "address and undefined": ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
# Instrumented code is large: a tenth of the time to compile, the same C.
APART = "-DTM_INLINE=static __attribute__((noinline, unused))"
FEW = "-DSTEP_WORK=64"  # so that small calls use several threads
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
ISAS = list(dict.fromkeys([str(cpu.isa()), "base"]))
LETTERS = {"int": "i", "int64_t": "l", "float": "f", "double": "d"}


def prototypes(sources: Path = build.SOURCES) -> dict[str, tuple[str, bool]]:
    """List every exported function by name.

    Its signature in the letters of ``cpu.function``, and whether its last argument is the number of threads. Of a
    function that takes one struct, the letters are those of the struct's fields.
    """
    found, packed = {}, structs(sources)
    for path in sorted(sources.glob("*.c")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        for name, inside in re.findall(r"^TM_EXPORT\((\w+)\)\s*\(([^)]*)\)\s*\{", text, flags=re.M):
            types = [
                re.sub(r"\b(const|restrict)\b", "", part).split() for part in inside.replace("*", " * ").split(",")
            ]
            if name in packed:
                found[name] = packed[name], False
                continue
            found[name] = (
                "".join("p" if "*" in words else LETTERS[words[0]] for words in types),
                types[-1][-1] == "threads",
            )
    return found


def invoker(isa: str, functions: dict[str, tuple[str, bool]]) -> str:
    """The C text that calls a function by name with an array of values."""
    ctype = {"p": "void *", "l": "int64_t", "i": "int", "f": "float", "d": "double"}
    packed = structs()
    takes = {
        name: "const value *" if name in packed else ", ".join(ctype[letter] for letter in letters)
        for name, (letters, _) in functions.items()
    }
    lines = [f"void tm_{isa}_{name}({given});" for name, given in takes.items()]
    lines.append("static int invoke(const char *name, const value *v, int threads) {\n    (void)threads;")
    for name, (letters, threaded) in functions.items():
        given = [f"v[{i}].{letter}" for i, letter in enumerate(letters)]
        given = [*given[:-1], "threads"] if threaded else given
        given = ["v"] if name in packed else given  # a value is as long as a field of a struct
        lines.append(f'    if (!strcmp(name, "{name}")) return tm_{isa}_{name}({", ".join(given)}), 1;')
    return "\n".join([*lines, "    return 0;\n}\n"])


def compiled(place: Path, isa: str, flags: list[str], sources: Path = build.SOURCES) -> Path:
    """The harness with the kernels of one instruction set."""
    (place / "calls.h").write_text(invoker(isa, prototypes(sources)))
    common = [
        "gcc",
        "-std=gnu11",
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        FEW,
        *flags,
    ]
    kernels = [
        *common,
        "-fopenmp",
        *build.X86.get(isa, []),
        f"-DTM_ISA={isa}",
        APART,
        "-c",
        str(sources / "kernels.c"),
        "-o",
        str(place / "kernels.o"),
    ]
    harness = [
        *common,
        "-Wall",
        f"-I{place}",
        str(FOLDER / "harness.c"),
        str(place / "kernels.o"),
        "-lm",
        "-lpthread",
        "-o",
        str(place / "harness"),
    ]
    for command in (kernels, harness):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return place / "harness"


def harnessed(program: Path, recording: Path) -> subprocess.CompletedProcess:
    """The harness run, where the loader may not choose addresses that an older sanitizer cannot take."""
    still = (
        ["setarch", "-R"]
        if shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
        else []
    )
    return subprocess.run(
        [*still, program, recording], env={**os.environ, **OPTIONS}, capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """isa -> (the file of recorded calls, the names of what was called)."""
    made = {}
    for isa in ISAS:
        path = tmp_path_factory.mktemp("calls") / isa
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "TOKENMIX_ISA": isa,
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, FOLDER / "record.py", path], env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        made[isa] = path, set(done.stdout.split())
    return made


def test_signatures_are_those_of_the_sources():
    """What ctypes was told of each function, against its definition in C."""
    sys.path.insert(0, str(FOLDER))
    import record

    sys.path.remove(str(FOLDER))
    told = {}
    for module in record.modules():
        for raw in vars(module).values():
            for function in raw.values() if isinstance(raw, dict) else [raw]:
                if isinstance(function, record.FUNCTION):
                    told[function.__name__.split("_", 2)[2]] = "".join(
                        record.LETTERS[kind] for kind in function.argtypes
                    )
    packed = structs()
    assert told == {name: "s" if name in packed else letters for name, (letters, _) in prototypes().items()}


def test_every_exported_function_has_a_prototype_and_is_called(recording):
    names = set(re.findall(rf"\btm_{cpu.isa()}_(\w+)", build.LIBRARY.read_bytes().decode("latin-1")))
    assert {name for name in names if hasattr(cpu._library, f"tm_{cpu.isa()}_{name}")} == set(prototypes())
    for isa, (_, called) in recording.items():
        assert called == set(prototypes()), (
            f"{isa}: nothing recorded calls {', '.join(sorted(set(prototypes()) - called))}; "
            "add a row to fuzz_forms or record"
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SANITIZERS)
def test_clean(kind, isa, recording, tmp_path):
    done = harnessed(compiled(tmp_path, isa, SANITIZERS[kind]), recording[isa][0])
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-500:]}\n{done.stderr[:6000]}"
    assert re.fullmatch(r"[1-9]\d* calls, 0 wrong\n", done.stdout)


PLANTED = {
    "a row written one too long": (
        "address and undefined",
        "tm.h",
        "c < n; c++) p[c] = tm_to_bf16(buffer[c])",
        "c <= n; c++) p[c] = tm_to_bf16(buffer[c])",
    ),
    "an integer that cannot hold its number": (
        "address and undefined",
        "tm.h",
        "bits = (bits + 127u) << 23;",
        "bits = (uint32_t)(((int32_t)(x * 1.5f) + 127) << 23);",
    ),
    "a history read beyond its last token": (
        "address and undefined",
        "decode.c",
        "j0 + STEP_SEGMENT, a->R + t + 1);",
        "j0 + STEP_SEGMENT, a->R + t + 2);",
    ),
    "a buffer that threads share": (
        "thread",
        "aft_simple.c",
        "    float kbuf[SCAN_W], vbuf[SCAN_W], qbuf[SCAN_W], ybuf[SCAN_W];\n",
        "    static float kbuf[SCAN_W], vbuf[SCAN_W], qbuf[SCAN_W], ybuf[SCAN_W];\n",
    ),
    "memory that is never freed": ("address and undefined", "aft_simple.c", "    free(x);\n", "    x = NULL;\n"),
}
REPORTS = {
    "address and undefined": r"ERROR: \w+Sanitizer|runtime error",
    "thread": "WARNING: ThreadSanitizer: data race",
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_reported(bug, recording, tmp_path):
    kind, file, old, new = PLANTED[bug]
    sources = Path(shutil.copytree(build.SOURCES, tmp_path / "src"))
    text = (sources / file).read_text()
    assert text.count(old) == 1, "bring the patch up to date"
    (sources / file).write_text(text.replace(old, new))
    done = harnessed(compiled(tmp_path, "base", SANITIZERS[kind], sources), recording["base"][0])
    assert done.returncode not in (0, 2, 3)
    assert re.search(REPORTS[kind], done.stderr), done.stderr[:2000]
