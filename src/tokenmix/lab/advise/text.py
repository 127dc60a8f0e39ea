"""The results as sentences and tables."""

from __future__ import annotations

from ...system.text import Table, number, seconds, size
from ...types import Record
from .advice import Advice
from .amdahl import bound, share_for
from .candidates import OWN, Candidate
from .compare import BYTES_OF_NOISE
from .measuring import Share


def text(advice: Advice) -> str:
    """Format everything for a terminal."""
    tables = [t.text() for t in (shares_table(advice), *candidate_tables(advice), *comparison_tables(advice))]
    return "\n\n".join(["\n".join([about(advice), describe_setting(advice)]), *tables, "\n".join(findings(advice))])


def as_json(advice: Advice) -> Record:
    """Return everything as plain JSON values."""
    crossing, host = advice.crossover, advice.host
    beginning = None if crossing.tokens is None else host.inputs.length(crossing.tokens)
    return {
        "model": {
            "name": host.name,
            "class": type(host.model).__name__,
            "host": host.origin,
            "parameters": parameters(advice),
            "notes": list(host.notes),
        },
        "attention": [
            {"name": m.name, "family": m.family, "heads": m.heads, "dim": m.dim, "causal": m.causal, "cross": m.cross}
            for m in advice.modules
        ],
        "machine": advice.machine,
        "setting": {"batch": advice.batch, "unit": host.inputs.unit, "worth": advice.worth},
        "lengths": [s.to_json() for s in advice.shares],
        "skipped": [vars(s) for s in advice.skipped],
        "answer": {"pays": advice.pays, "first_length": beginning, "how": crossing.how, "text": answer(advice)},
        "candidates": [r.to_json() for r in advice.rows],
        "distilled": None if advice.distilled is None else {k: v for k, v in advice.distilled.items() if k != "table"},
        "nearness": {label: vars(near) for label, near in advice.nearness.items()},
        "refused": advice.refused,
    }


def parameters(advice: Advice) -> int:
    """Return the number of parameters of the whole model."""
    return sum(p.numel() for p in advice.host.model.parameters())


def about(advice: Advice) -> str:
    """Describe the model."""
    host, modules = advice.host, advice.modules
    ways = [("causal" if m.causal else "cross" if m.cross else "bidirectional") for m in modules]
    counts = ", ".join(f"{ways.count(w)} {w}" for w in dict.fromkeys(ways))
    shapes = ", ".join(dict.fromkeys(f"{m.heads} heads, {m.dim} features" for m in modules))
    notes = "".join(f"; {note}" for note in host.notes)
    kind = f"{type(host.model).__name__} ({host.origin}), {parameters(advice):,} parameters"
    return f"{host.name}: {kind}, attention modules: {counts} ({shapes}){notes}"


def describe_setting(advice: Advice) -> str:
    """Describe the machine and what a pass is."""
    m = advice.machine
    busy = m["load"] is not None and m["load"] > max(m["threads"], m["cores"] or 1) + 1
    load = f"; BUSY: load {m['load']:.1f} on {m['cores']} cores, other processes ran too" if busy else ""
    return f"forward passes, batch {advice.batch}, on {m['device']}, {m['threads']} threads, torch {m['torch']}{load}"


def percent(share: float | None) -> str:
    """Format a share: 0.042 -> "4.2 %", 0.42 -> "42 %"."""
    return number(None) if share is None else f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def length(advice: Advice, n: int) -> str:
    """Format a length, with both sides if it is that of an image."""
    return f"{n:,}" if advice.host.inputs.patch is None else f"{n} x {n}"


def shares_table(advice: Advice) -> Table:
    """Build a table with a row for each measured length; the notes list the others."""
    columns = [
        "length",
        "tokens",
        "one pass",
        "in attention",
        "mixing alone",
        "at best",
        "peak memory",
        "for attention",
    ]
    rows = [_share(advice, s) for s in advice.shares]
    notes = [f"{length(advice, s.length)}: not measured: {s.why}." for s in advice.skipped]
    notes += [
        "In attention, mixing alone: shares of the time.",
        "Mixing is attention without its projections and norms, which another mixer needs too.",
        "At best: how many times as fast the model would be if mixing took no time (Amdahl).",
        "For attention: the part of the peak memory that is saved without it.",
    ]
    if any(m.family == "torch" for m in advice.modules):
        notes.append(
            "Measured without torch's fused inference pass of nn.TransformerEncoderLayer, whose parts cannot be timed."
        )
    return Table("Attention's part", columns, rows, notes)


def _share(advice: Advice, s: Share) -> list[str]:
    cells = [
        length(advice, s.length),
        f"{s.tokens:,}",
        seconds(s.seconds),
        percent(s.attention_share),
        percent(s.mixing_share),
        f"{s.bound:.2f}x",
    ]
    return [*cells, size(s.peak), percent(s.memory_share)]


def candidate_tables(advice: Advice) -> list[Table]:
    """Build one table for each length, and a ranking where the candidates were probed."""
    tables = [_candidates(advice, n) for n in dict.fromkeys(r.length for r in advice.rows)]
    return [*tables, _ranking_text(advice)] if advice.nearness and advice.longest else tables


def comparison_tables(advice: Advice) -> list[Table]:
    """Return the table of what was gained and lost, where the model was distilled."""
    return [] if advice.distilled is None else [advice.distilled["table"]]


def _ranking_text(advice: Advice) -> Table:
    """Rank the candidates by speed at the longest length and by nearness to the teacher after the probe."""
    rows, near = advice.longest, advice.nearness
    by_error = sorted((r.mixer for r in rows if r.mixer in near), key=lambda m: near[m].after)
    steps = max(n.steps for n in near.values())
    at = f"{length(advice, rows[0].length)} {advice.host.inputs.unit}"
    columns = ["mixer", "by speed", f"as fast at {at}", "by nearness", "error before", f"error after {_steps(steps)}"]
    body = []
    for i, r in enumerate(rows):
        known = near.get(r.mixer)
        rank = "-" if known is None else str(by_error.index(r.mixer) + 1)
        errors = [number(known.before if known else None), number(known.after if known else None)]
        body.append([r.mixer, str(i + 1), _times(r), rank, *errors])
    notes = ["Error: of what each layer adds, squared, relative to attention's: 0 is attention itself, 1 is nothing."]
    if any("random" in note for note in advice.host.notes):
        notes.append("The model's weights are random: the error says little of a trained model.")
    return Table("Candidates by speed and by nearness to the model's attention", columns, body, notes)


def _steps(n: int) -> str:
    return f"{n} step{'s' if n != 1 else ''}"


def _times(r: Candidate) -> str:
    """Format a speed-up with what its quartiles allow."""
    return f"{r.speedup or 0:.2f}x" + ("" if r.least is None or r.most is None else f" ({r.least:.2f} to {r.most:.2f})")


def above_bound(advice: Advice, r: Candidate) -> str | None:
    """Explain a speed-up above the predicted bound, if any."""
    share = next(s for s in advice.shares if s.length == r.length)
    if r.speedup is None or r.mixer == OWN or r.speedup <= share.bound:
        return None
    above = f"above the bound of {share.bound:.2f}x"
    if r.least is not None and r.least <= share.bound:
        return f"{above} only within the noise: the quartiles of its timings allow {r.least:.2f}x to {r.most:.2f}x"
    whole = bound(min(share.attention_share, 0.999))
    if r.saved and r.saved > 0 and r.speedup <= whole:
        fewer = f"it has {r.saved:,} parameters fewer than attention"
        return f"{above}, because {fewer}, whose projections the bound keeps; without any attention it is {whole:.2f}x"
    return f"{above}, which was measured in other passes: the machine was busier then, so trust neither, measure again"


def _candidates(advice: Advice, n: int) -> Table:
    rows = [r for r in advice.rows if r.length == n]
    decodes = any(r.decoded for r in rows)
    columns = ["mixer", "one pass", "as fast", "peak memory", *(["state", "ms per token"] if decodes else [])]
    body, notes = [], []
    for r in rows:
        if r.seconds is None:
            notes.append(f"{r.mixer}: not measured: {r.why}.")
            continue
        decoded = (
            [size(r.decoded.state_bytes), number(r.decoded.ms_per_token, 2)]
            if r.decoded
            else ["no streaming", "no streaming"]
        )
        body.append([r.mixer, seconds(r.seconds), _times(r), size(r.peak), *(decoded if decodes else [])])
        if reason := above_bound(advice, r):
            notes.append(f"{r.mixer}: {reason}.")
    body = body or [["none", *[number(None)] * (len(columns) - 1)]]
    notes.append(
        "As fast: times as fast as with its own attention, timed in turns; in brackets what the quartiles allow."
    )
    return Table(f"Other mixers inside this model, {length(advice, n)} {advice.host.inputs.unit}", columns, body, notes)


def findings(advice: Advice) -> list[str]:
    """Return the answer, and sentences on memory, the best candidate and the distillation."""
    found = [answer(advice)]
    most = max(
        (s for s in advice.shares if s.memory_share is not None), key=lambda s: s.memory_share or 0.0, default=None
    )
    if most is not None and (most.peak or 0) - (most.without or 0) > BYTES_OF_NOISE:
        at, saved = length(advice, most.length), percent(most.memory_share)
        found.append(f"Memory: at {at} the peak of a pass would be up to {saved} lower without attention.")
    best = advice.fastest
    if best is not None:
        measured = f"{best.mixer} makes the model {best.speedup:.2f}x as fast at {length(advice, best.length)}"
        reason = above_bound(advice, best)
        measured += f" ({reason})" if reason else ""
        if best is not (first := advice.longest[0]):
            measured += f", no slower than {first.mixer} beyond noise, and is nearer to the model's attention"
        found.append(
            f"Of the candidates, {measured}. Its quality has to be measured by training (--data, `tokenmix convert`)."
        )
    elif advice.longest:
        found.append("None of the candidates makes the model faster at the longest length measured, beyond noise.")
    if advice.nearness:
        name, near = min(advice.nearness.items(), key=lambda item: item[1].after)
        found.append(
            f"Nearest to its attention after a probe of {_steps(near.steps)} is {name}: error {near.after:.3f}, "
            f"{near.before:.3f} before."
        )
    if advice.distilled is not None:
        found.append(distillation(advice.distilled))
    if advice.refused is not None:
        found.append(f"Nothing was replaced: {advice.refused}. --anyway replaces and distils all the same.")
    return found


def answer(advice: Advice) -> str:
    """Return the answer: yes and from which length on, or no with the share that decides it."""
    last = advice.shares[-1]
    wanted = f"{advice.worth:g}x (mixing at {percent(share_for(advice.worth))} of the time)"
    if advice.pays:
        best = max(advice.shares, key=lambda s: s.bound)
        limit = f"{_mixing_text(advice, best)}, so the model can become {best.bound:.2f}x as fast at most"
        return f"Yes, {_crossover_text(advice)}: {limit}. We call {wanted} worth it."
    here = f"{_mixing_text(advice, last)}; even a mixer that took none would give {last.bound:.2f}x"
    no = f"No: {percent(last.mixing_share)} here. Up to the longest length measured replacing attention does not pay"
    return f"{no}: {here}. {_crossover_later(advice, wanted)}"


def _mixing_text(advice: Advice, s: Share) -> str:
    return f"at {length(advice, s.length)} mixing takes {percent(s.mixing_share)} of the time"


def _crossover_text(advice: Advice) -> str:
    crossing = advice.crossover
    at = length(advice, advice.host.inputs.length(crossing.tokens or 0))
    if crossing.how == "measured":
        return f"at {at} already, the shortest length measured"
    return f"from about {at} on (between measured lengths, by the power of the length that fits both)"


def _crossover_later(advice: Advice, wanted: str) -> str:
    crossing, inputs = advice.crossover, advice.host.inputs
    if crossing.tokens is None:
        return f"Nothing here says that {wanted} is ever reached."
    n = inputs.length(crossing.tokens)
    beyond = (
        f", more than the {inputs.limit:,} the model takes" if inputs.limit is not None and n > inputs.limit else ""
    )
    return f"By the cost formula {wanted} is reached at about {length(advice, n)}{beyond}."


def distillation(found: Record) -> str:
    """Describe the distillation: loss before and after."""
    before, after = found["loss_before"], found["loss_after"]
    effort = f"{found['steps']} steps in {found['seconds']:.0f} s"
    return (
        f"{found['mixer']} in {found['layers']} layers, distilled for {effort}: "
        f"{found['loss']} {before:.4f} before, {after:.4f} after. Written to {found['out']}."
    ) + f" {found['comparison']['text'].replace('distilled', 'Distilled', 1)}"
