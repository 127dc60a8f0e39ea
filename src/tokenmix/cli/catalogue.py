"""What `tokenmix list` and `tokenmix doctor` say, as data and as text."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

EXTRAS = {
    "train": ("numpy", "tyro", "pyyaml", "rich", "safetensors"),
    "vision": ("numpy", "pillow", "scikit-learn", "timm"),
    "plot": ("numpy", "matplotlib", "jinja2"),
}
TORCH_NEEDED = (2, 9)
WIDTH = 120  # of lines on a terminal
ISAS = {"v4": "AVX-512 (v4)", "v3": "AVX2 (v3)", "base": "the instructions every machine of this kind has (base)"}
FIX = "reinstall tokenmix and torch, or report this with the output of `tokenmix doctor --json`"


def catalogue() -> dict[str, Any]:
    """Mixers, recipes and corpora of this version."""
    from ..data import CORPORA, IMAGE_SETS
    from ..mixers import MIXERS, mixer_options, state_growth
    from ..models import MODELS
    from ..recipes import RECIPES, SIZES

    mixers = {}
    for name, cls in MIXERS.items():
        able = [c for c in ("causal", "streaming", "context", "attn_mask", "grid", "export") if getattr(cls, f"supports_{c}")]
        options = {k: "required" if v is inspect.Parameter.empty else v for k, v in mixer_options(cls).items()}
        mixers[name] = {
            "about": (inspect.getdoc(cls) or "").split("\n")[0],
            **cls.about._asdict(),
            "kernels": cls.kernels._asdict(),
            "state": state_growth(name),
            "can": able,
            "options": options,
            "exceptions": dict(cls.exceptions),
        }
    recipes = {}
    for name, recipe in RECIPES.items():
        rows = {row: {"about": r.about, "printed": r.printed} for row, r in recipe.rows.items()}
        recipes[name] = {"about": recipe.about, "default": recipe.default, "sizes": list(SIZES), "rows": rows}
    return {"mixers": mixers, "recipes": recipes, "models": list(MODELS), "corpora": CORPORA, "images": IMAGE_SETS}


def catalogue_text(found: dict[str, Any]) -> str:
    """The catalogue for reading."""
    lines = _wrapped("", "mixers, with what they need and can; an option without a value must be given", 0)
    for name, m in found["mixers"].items():
        lines += _mixer_lines(name, m)
    lines.append("recipes")
    for name, r in found["recipes"].items():
        lines += _wrapped(f"  {name}: ", f"{r['about']}; sizes {', '.join(r['sizes'])}", 6)
        for row, entry in r["rows"].items():
            label = f"      --row {row}{' (default)' if row == r['default'] else ''}: "
            lines += _wrapped(label, f"{entry['about']}{_printed(entry['printed'])}", 14)
    lines += ["models by name", *_wrapped("  ", ", ".join(found["models"]), 2)]
    for title in ("corpora", "images"):
        lines.append(title)
        lines += [line for name, about in found[title].items() for line in _wrapped(f"  {name}: ", about, 6)]
    return "\n".join(lines)


def _mixer_lines(name: str, m: dict[str, Any]) -> list[str]:
    """One mixer, a line or more for each of its facts."""
    options = ", ".join(k if v == "required" else f"{k}={v!r}" for k, v in m["options"].items())
    facts = [("paper", m["paper"] or "none given"), ("kind", m["kind"]), ("cost", f"time {m['time']}; space {m['space']}; state: {m['state']}")]
    facts += [("can", ", ".join(m["can"])), ("options", options)]
    whole, step = m["kernels"]["whole"], m["kernels"]["step"]
    facts += [("kernels", ", ".join([*whole, *([f"{step} for a few streamed tokens"] if step else [])]))] if whole or step else []
    promises: dict[str, list[str]] = {}
    for promise, reason in m["exceptions"].items():
        promises.setdefault(reason, []).append(promise)
    facts += [("except", f"{', '.join(kept)}: {reason}") for reason, kept in promises.items()]
    return [
        *_wrapped(f"  {name} [{m['tier']}]: ", m["about"].replace("``", "`"), 6),
        *(part for fact in facts for part in _wrapped(f"      {fact[0]:8}", fact[1], 14)),
    ]


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Label and text in lines of the terminal's width, of WIDTH at most and where there is no terminal."""
    width = max(min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns), indent + 1)
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _printed(numbers: dict[str, float]) -> str:
    texts = {"test": "test {:.3f} bits", "top1": "{:.1f} % top-1", "top1_easycv": "{:.2f} % top-1 (EasyCV)", "parameters_m": "{:.1f}M parameters"}
    found = [text.format(numbers[name]) for name, text in texts.items() if name in numbers]
    return f"; printed: {', '.join(found)}" if found else ""


def diagnose() -> dict[str, Any]:
    """The state of this installation; ``broken`` lists what fails, each with its fix."""
    import torch

    from .. import __version__
    from ..functional.backend import RULE, check_backend

    broken = []
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < TORCH_NEEDED:
        broken.append(f"torch {torch.__version__} is too old: pip install 'torch>=2.9'")
    wanted = os.environ.get("TOKENMIX_BACKEND", "auto")
    try:
        check_backend(wanted)
    except ValueError as why:
        broken.append(f"TOKENMIX_BACKEND: {why} Unset it, or set it to one of those")
    trials = _trials() if not broken else {}
    broken += [f"{name}: {outcome}" for name, outcome in trials.items() if outcome != "ok"]
    return {
        "tokenmix": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "triton": _version("triton"),
        "backend": {"default": wanted, "rule": RULE},
        "kernels": _kernels(),
        "extras": {extra: {package: _version(package) for package in packages} for extra, packages in EXTRAS.items()},
        "forward": trials,
        "broken": broken,
    }


def _kernels() -> dict[str, dict[str, Any]]:
    """C and Triton kernels: whether they can be used, or why not, and which operators have them."""
    from ..kernels import cpu, triton
    from ..kernels.operator import OPERATORS

    names = {kind: [name for name, operator in OPERATORS.items() if kind in operator.on] for kind in ("cpu", "triton")}
    return {
        "cpu": {"available": cpu.available(), "why_not": cpu.why_not(), "isa": cpu.isa(), "hash": cpu.built_from(), "operators": names["cpu"]},
        "triton": {"available": triton.available(), "why_not": triton.why_not(), "interpreted": triton.INTERPRETED, "operators": names["triton"]},
    }


def _kernel_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    cpu, triton = found["cpu"], found["triton"]
    said = {
        "C": (cpu, f"{ISAS.get(cpu['isa'], cpu['isa'])}, built from {cpu['hash']}"),
        "Triton": (triton, "interpreted on the CPU (TRITON_INTERPRET=1)" if triton["interpreted"] else "for the GPU"),
    }
    lines = []
    for kind, (state, how) in said.items():
        has = f"; they run {', '.join(state['operators'])}" if state["operators"] else "; none are written yet"
        lines += _wrapped("kernels  ", f"{kind}: {how}{has}" if state["available"] else f"{kind}: not in use: {state['why_not']}", 9)
    return lines


def _trials() -> dict[str, str]:
    """One forward pass per mixer, causal and not."""
    import torch

    from ..mixers import MIXERS, build_mixer

    found = {}
    for name, cls in MIXERS.items():
        for causal in (False, True) if cls.supports_causal else (False,):
            label = f"{name} {'causal' if causal else 'bidirectional'}"
            try:
                y = build_mixer(name, 16, causal=causal, **cls.example_options(8, heads=2))(torch.randn(2, 8, 16))
                sound = bool(torch.isfinite(y).all()) and y.shape == (2, 8, 16)
                found[label] = "ok" if sound else f"the output is not finite; {FIX}"
            except Exception as why:  # whatever it is, the doctor's job is to say so
                found[label] = f"{type(why).__name__}: {why}; {FIX}"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def diagnosis_text(found: dict[str, Any]) -> str:
    """The diagnosis for reading."""
    lines = [
        f"tokenmix {found['tokenmix']}, torch {found['torch']}, python {found['python']}",
        f"threads  {found['threads']} on {found['cores']} cores",
        f"gpu      {found['gpu'] or 'none: everything runs on the CPU'}",
        f"triton   {found['triton'] or 'not installed, not needed'}",
        *_kernel_lines(found["kernels"]),
        *_wrapped("backend  ", f"{found['backend']['default']}; rule of {found['backend']['rule']}", 9),
    ]
    for extra, packages in found["extras"].items():
        missing = [p for p, version in packages.items() if version is None]
        have = ", ".join(f"{p} {version}" for p, version in packages.items() if version)
        lines.append(f"extra    {extra}: {have}" + (f"; missing {', '.join(missing)}: pip install 'tokenmix[{extra}]'" if missing else ""))
    good = sum(outcome == "ok" for outcome in found["forward"].values())
    mixers = len({label.split()[0] for label in found["forward"]})
    lines.append(f"forward  {good} of {len(found['forward'])} ok: {mixers} mixers, bidirectional and, where they can be, causal")
    lines += [f"BROKEN   {what}" for what in found["broken"]]
    return "\n".join([*lines, "something is broken, see above" if found["broken"] else "all well"])
