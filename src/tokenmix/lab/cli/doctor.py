"""What `tokenmix doctor` reports, as data and as text."""

from __future__ import annotations

import os
import platform

from ...system.malloc import why_not_kept
from ...system.version import __version__
from ...types import Record
from .extras import EXTRAS, installed_version, try_extras, versions
from .output import wrap_text

TORCH_NEEDED = (2, 9)
ISAS = {
    "v4": "AVX-512 (v4)",
    "v3": "AVX2 (v3)",
    "base": "the instructions that every machine of this architecture has (base)",
}
FIX = "reinstall tokenmix and torch, or report this with the output of `tokenmix doctor --json`"


def diagnose() -> Record:
    """Return the state of this installation; ``broken`` lists what fails, each with its fix."""
    import torch

    from ...kernels.backend import AUTO_RULE, check_backend

    broken = []
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < TORCH_NEEDED:
        broken.append(f"torch {torch.__version__} is too old: pip install 'torch>=2.9'")
    wanted = os.environ.get("TOKENMIX_BACKEND", "auto")
    try:
        check_backend(wanted)
    except ValueError as why:
        broken.append(f"TOKENMIX_BACKEND: {why} Unset it, or set it to one of those")
    trials = _trials() if not broken else {}
    uses, note = try_extras()
    broken += [f"{name}: {outcome}" for name, outcome in trials.items() if outcome != "ok"]
    for outcome in dict.fromkeys(uses.values()):  # what fails for one reason stands in one line
        if outcome != "ok":
            broken.append(f"extra {', '.join(name for name, said in uses.items() if said == outcome)}: {outcome}")
    return {
        "tokenmix": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "triton": installed_version("triton"),
        "backend": {"default": wanted, "rule": AUTO_RULE},
        "kernels": _kernels(),
        "memory": {"can_be_kept": not why_not_kept(), "why_not": why_not_kept()},
        "extras": {extra: versions(extra) for extra in EXTRAS},
        "uses": uses,
        "note": note,
        "forward": trials,
        "broken": broken,
    }


def _kernels() -> dict[str, Record]:
    """Return for the C and Triton kernels whether they can be used, or why not, and which operators have them."""
    from ...kernels import cpu, triton
    from ...kernels.operator import OPERATORS

    return {
        "cpu": {
            "available": cpu.available(),
            "why_not": cpu.why_not(),
            "isa": cpu.isa(),
            "hash": cpu.built_from(),
            "operators": [name for name, operator in OPERATORS.items() if "cpu" in operator.on],
        },
        "triton": {
            "available": triton.available(),
            "why_not": triton.why_not(),
            "interpreted": triton.INTERPRETED,
            "operators": [name for name, operator in OPERATORS.items() if "triton" in operator.on],
        },
    }


def _kernel_lines(found: dict[str, Record]) -> list[str]:
    cpu, triton = found["cpu"], found["triton"]
    said = {
        "C": (cpu, f"{ISAS.get(cpu['isa'], cpu['isa'])}, built from {cpu['hash']}"),
        "Triton": (triton, "interpreted on the CPU (TRITON_INTERPRET=1)" if triton["interpreted"] else "for the GPU"),
    }
    lines = []
    for kind, (state, how) in said.items():
        has = f"; they run {', '.join(state['operators'])}" if state["operators"] else "; none are written yet"
        use = f"{how}{has}" if state["available"] else f"not in use: {state['why_not']}"
        lines += wrap_text("kernels  ", f"{kind}: {use}", 9)
    return lines


def _trials() -> dict[str, str]:
    """Run a forward pass of every mixer in each form that it has; return "ok" or the failure by name."""
    import torch

    from ...mixers import MIXERS, build_mixer

    found = {}
    for name, cls in MIXERS.items():
        for causal in cls.facts.causal_forms():
            label = f"{name} {'causal' if causal else 'bidirectional'}"
            try:
                y = build_mixer(name, 16, causal=causal, **cls.example_options(8, heads=2))(torch.randn(2, 8, 16))
                sound = bool(torch.isfinite(y).all()) and y.shape == (2, 8, 16)
                found[label] = "ok" if sound else f"the output is not finite; {FIX}"
            except Exception as why:  # every failure belongs into the report
                found[label] = f"{type(why).__name__}: {why}; {FIX}"
    return found


def diagnosis_text(found: Record) -> str:
    """Return the diagnosis as text."""
    lacking = found["memory"]["why_not"]
    memory = f"keep_memory() has no effect here: {lacking}" if lacking else "keep_memory() works"
    lines = [
        f"tokenmix {found['tokenmix']}, torch {found['torch']}, python {found['python']}",
        f"threads  {found['threads']} on {found['cores']} cores",
        f"gpu      {found['gpu'] or 'none: everything runs on the CPU'}",
        f"triton   {found['triton'] or 'not installed, not needed'}",
        *_kernel_lines(found["kernels"]),
        f"memory   {memory}",
        *wrap_text("backend  ", f"{found['backend']['default']}; rule of {found['backend']['rule']}", 9),
    ]
    for extra, packages in found["extras"].items():
        missing = [p for p, version in packages.items() if version is None]
        have = ", ".join(f"{p} {version}" for p, version in packages.items() if version)
        fix = f"; missing {', '.join(missing)}: pip install 'tokenmix[{extra}]'" if missing else ""
        state = "; works" if found["uses"].get(extra) == "ok" else "; BROKEN, see below" if not missing else ""
        lines += wrap_text("extra    ", f"{extra}: {have}{fix}{state}", 9)
    good = sum(outcome == "ok" for outcome in found["forward"].values())
    mixers = len({label.split()[0] for label in found["forward"]})
    tried = len(found["forward"])
    lines.append(f"forward  {good} of {tried} ok: {mixers} mixers, bidirectional and causal where they are")
    lines += [f"note     {found['note']}"] if found["note"] else []
    lines += [f"BROKEN   {what}" for what in found["broken"]]
    return "\n".join([*lines, "something is broken, see above" if found["broken"] else "all well"])
