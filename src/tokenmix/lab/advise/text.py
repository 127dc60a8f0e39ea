"""The results as sentences and tables."""

from __future__ import annotations

from collections.abc import Mapping

from ...system.text import Table, number, seconds, size
from ...types import Record
from .advice import Advice
from .amdahl import share_for
from .candidates import OWN, Candidate
from .choice import NO, Choice, at_longest, rows_in, untimed
from .compare import BYTES_OF_NOISE
from .distill import quality_command
from .measuring import SPREAD, Share
from .probe import STEPS, Nearness
from .runtimes import RUNTIMES

NOT_RANKED = "not ranked"


def text(advice: Advice) -> str:
    """Format everything for a terminal."""
    tables = [t.text() for t in (shares_table(advice), *candidate_tables(advice), *comparison_tables(advice))]
    return "\n\n".join(["\n".join([about(advice), describe_setting(advice)]), *tables, "\n".join(findings(advice))])


def as_json(advice: Advice) -> Record:
    """Return everything as plain JSON values."""
    crossing, host, choice = advice.crossover, advice.host, advice.choice
    beginning = None if crossing.tokens is None else host.inputs.length(crossing.tokens)
    return {
        "model": {
            "name": host.name,
            "class": type(host.model).__name__,
            "host": host.origin,
            "parameters": parameters(advice),
            "notes": list(host.notes),
            "options": host.options,
        },
        "attention": [
            {"name": m.name, "family": m.family, "heads": m.heads, "dim": m.dim, "causal": m.causal, "cross": m.cross}
            for m in advice.modules
        ],
        "machine": advice.machine,
        "setting": {
            "batch": advice.batch,
            "unit": host.inputs.unit,
            "worth": advice.worth,
            "runtime": advice.runtime,
        },
        "lengths": [s.to_json() for s in advice.shares],
        "skipped": [vars(s) for s in advice.skipped],
        "answer": {"verdict": advice.verdict, "by": "speed", "text": answer(advice)},
        "quality": {"measured": advice.distilled is not None, "text": describe_quality(advice)},
        "bound": {"first_length": beginning, "how": crossing.how, "text": describe_bound(advice)},
        "choice": None
        if choice is None
        else {"mixer": choice.row.mixer, "length": choice.row.length, "why": choice.why},
        "specs": advice.specs,
        "candidates": [r.to_json() for r in advice.rows],
        "plan": None if advice.plan is None else advice.plan.to_json(),
        "distilled": None if advice.distilled is None else {k: v for k, v in advice.distilled.items() if k != "table"},
        "nearness": {label: {**vars(near), "ranks": near.ranks} for label, near in advice.nearness.items()},
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
        "bound",
        "peak memory",
        "for attention",
    ]
    rows = [_share(advice, s) for s in advice.shares]
    notes = [f"{length(advice, s.length)}: not measured: {s.why}." for s in advice.skipped]
    notes += [
        f"{length(advice, s.length)}: {_still_spread('passes', s.spread, s.passes)}."
        for s in advice.shares
        if s.spread > SPREAD
    ]
    notes += [
        "One pass: its quartiles. In attention, mixing alone: shares of the time.",
        "Mixing is attention without its projections and norms, which another mixer needs too.",
        "Bound: how many times as fast the model would be if mixing took no time (Amdahl), for no mixer.",
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
        _passes(s.seconds, s.high),
        percent(s.attention_share),
        percent(s.mixing_share),
        f"{s.bound:.2f}x",
    ]
    return [*cells, size(s.peak), percent(s.memory_share)]


def candidate_tables(advice: Advice) -> list[Table]:
    """Build one table for each length and runtime, and a ranking where the candidates were probed."""
    tables = [_candidates(advice, *at) for at in dict.fromkeys((r.length, r.runtime) for r in advice.rows)]
    return [*tables, _ranking_text(advice)] if advice.nearness and advice.longest else tables


def comparison_tables(advice: Advice) -> list[Table]:
    """Return the table of layers, where a budget was given, and of what was gained and lost, after distillation."""
    layers = [] if advice.plan is None else [advice.plan.table()]
    return layers if advice.distilled is None else [*layers, advice.distilled["table"]]


def _ranking_text(advice: Advice) -> Table:
    """Rank the candidates by speed at the longest length, and by nearness to the teacher after a probe that ranks."""
    rows, near = advice.longest, advice.nearness
    by_error = sorted((r.mixer for r in rows if r.mixer in near and near[r.mixer].ranks), key=lambda m: near[m].after)
    steps = max(n.steps for n in near.values())
    at = f"{length(advice, rows[0].length)} {advice.host.inputs.unit}"
    columns = ["mixer", "by speed", f"as fast at {at}", "quality", "error before", f"error after {_steps(steps)}"]
    body = []
    for i, r in enumerate(rows):
        known = near.get(r.mixer)
        rank = str(by_error.index(r.mixer) + 1) if r.mixer in by_error else NOT_RANKED
        errors = [number(known.before if known else None), number(known.after if known else None)]
        body.append([r.mixer, str(i + 1), _times(r), rank, *errors])
    notes = ["Error: of what each layer adds, squared, relative to attention's: 0 is attention itself, 1 is nothing."]
    if not by_error:
        notes.append(f"Quality: {NOT_RANKED}: {_steps(steps)} of learning rank nothing, {STEPS} are needed.")
    elif any("random" in note for note in advice.host.notes):
        notes.append("The model's weights are random: the error says little of a trained model.")
    return Table("Candidates by speed and by nearness to the model's attention", columns, body, notes)


def _steps(n: int) -> str:
    return f"{n} step{'s' if n != 1 else ''}"


def _passes(low: float, high: float | None) -> str:
    """Format the quartiles of the time of a pass."""
    return seconds(low) if high is None else f"{seconds(low)} to {seconds(high)}"


def _still_spread(what: str, spread: float | None, turns: int | None) -> str:
    return f"its {what} still spread by {percent(spread)} after {turns} samples, as the machine was busy"


def _times(r: Candidate) -> str:
    """Format a speed-up with its quartiles."""
    if r.speedup is None:
        return "not known"
    return f"{r.speedup:.2f}x" + (
        "" if r.mixer == OWN or r.least is None or r.most is None else f" ({r.least:.2f} to {r.most:.2f})"
    )


def above_bound(advice: Advice, r: Candidate) -> str | None:
    """Explain a speed-up above the bound, which was measured in eager torch, if any."""
    share = next((s for s in advice.shares if s.length == r.length), None)
    if share is None or r.runtime != "eager" or r.speedup is None or r.mixer == OWN or r.speedup <= share.bound:
        return None
    above = f"above the bound of {share.bound:.2f}x"
    if r.least is not None and r.least <= share.bound:
        return f"{above} only within the noise: the quartiles of its timings allow {r.least:.2f}x to {r.most:.2f}x"
    if r.saved and r.saved > 0 and r.speedup <= share.limit:
        fewer = f"it has {r.saved:,} parameters fewer than attention"
        without = f"without any attention it is {share.limit:.2f}x"
        return f"{above}, because {fewer}, whose projections the bound keeps; {without}"
    return f"{above}, which was measured in other passes: the machine was busier then, so trust neither, measure again"


def _candidates(advice: Advice, n: int, runtime: str) -> Table:
    rows = [r for r in advice.rows if (r.length, r.runtime) == (n, runtime)]
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
        body.append([r.mixer, _passes(r.seconds, r.high), _times(r), size(r.peak), *(decoded if decodes else [])])
        if r.note:
            notes.append(f"{r.mixer}: {r.note}.")
        if (r.spread or 0) > SPREAD:
            notes.append(f"{r.mixer}: {_still_spread('ratios', r.spread, r.turns)}.")
        if reason := above_bound(advice, r):
            notes.append(f"{r.mixer}: {reason}.")
    body = body or [["none", *[number(None)] * (len(columns) - 1)]]
    notes.append(
        "One pass: its quartiles. As fast: times as fast as with its own attention; the median of ratios of two passes "
        "timed one after the other, and their quartiles."
    )
    at = f"{length(advice, n)} {advice.host.inputs.unit}"
    return Table(f"Other mixers inside this model, {at}, {RUNTIMES[runtime]}", columns, body, notes)


def findings(advice: Advice) -> list[str]:
    """Return the answer, and sentences on the bound, memory, the choice and the distillation."""
    found = [answer(advice), *([] if advice.choice is None else [describe_quality(advice)]), describe_bound(advice)]
    most = max(
        (s for s in advice.shares if s.memory_share is not None), key=lambda s: s.memory_share or 0.0, default=None
    )
    if most is not None and (most.peak or 0) - (most.without or 0) > BYTES_OF_NOISE:
        at, saved = length(advice, most.length), percent(most.memory_share)
        found.append(f"Memory: at {at} the peak of a pass would be up to {saved} lower without attention.")
    if advice.choice is not None:
        found.append(describe_choice(advice, advice.choice))
    if advice.nearness:
        found.append(_describe_nearness(advice.nearness))
    if advice.plan is not None:
        found += advice.plan.sentences()
    if advice.distilled is not None:
        found.append(distillation(advice.distilled))
    if advice.refused is not None:
        found.append(f"Nothing was replaced: {advice.refused}. --anyway replaces and distils all the same.")
    return found


def answer(advice: Advice) -> str:
    """Return the verdict, which is by speed alone, with the measurement that decides it."""
    where, bar = RUNTIMES[advice.runtime], f"the bar of {advice.worth:g}x"
    timed = rows_in(advice.rows, advice.runtime)
    reached = [r for r in timed if r.reaches(advice.worth)]
    if reached:
        lengths = list(dict.fromkeys(r.length for r in reached))
        missed = [n for n in dict.fromkeys(r.length for r in timed) if n not in lengths]
        best = at_longest(reached)[0]
        not_at = f"; at {_list_lengths(advice, missed)} none reaches it" if missed else ""
        yes = f"Yes, by speed, at {_list_lengths(advice, lengths)}"
        return f"{yes}: {_describe_speed(advice, best)} in {where}, {bar} or more{not_at}."
    if timed:
        best = max(timed, key=lambda r: r.high_speedup)
        if advice.verdict == NO:
            return f"No: no candidate measured reaches {bar} in {where}. The best: {_describe_speed(advice, best)}."
        said = f"Open: {_describe_speed(advice, best)} in {where}"
        if best.high_speedup < advice.worth:
            rest = sorted({*untimed(advice.shares, timed), *advice.left_out})
            return f"{said}; no candidate was measured at {_list_lengths(advice, rest)}."
        return f"{said}, but {bar} lies within the spread of its ratios; measure again on a quiet machine."
    if advice.verdict == NO:
        most = max(advice.shares, key=lambda s: s.limit)
        without = f"without any attention it would be {most.limit:.2f}x as fast"
        return f"No: not even a model without attention reaches {bar}: at {length(advice, most.length)} {without}."
    why = next((r.why for r in advice.rows if r.runtime == advice.runtime and r.why), None)
    hint = f"every one fails, the first with: {why}" if why else "--candidates auto measures some"
    if advice.left_out and all(s.limit < advice.worth for s in advice.shares):
        hint += f"; {_list_lengths(advice, advice.left_out)} left out"
    return f"Open: no candidate was measured in {where} ({hint}), and a bound alone says neither yes nor no."


def _describe_speed(advice: Advice, r: Candidate) -> str:
    return f"{r.mixer} makes the model {_times(r)} as fast at {length(advice, r.length)}"


def _list_lengths(advice: Advice, lengths: list[int]) -> str:
    return " and ".join(length(advice, n) for n in lengths)


def describe_quality(advice: Advice) -> str:
    """Say whether the quality of the model with another mixer was measured, and what measures it."""
    if advice.distilled is not None:
        return "Quality: the answer is by speed alone; what the distilled model keeps is in the last line."
    probed = any(near.ranks for near in advice.nearness.values())
    limits = " (the probe ranks candidates, and does not say what the model keeps)" if probed else ""
    return f"Quality: not measured, the answer is by speed alone{limits}; {quality_command(advice.host)}."


def describe_bound(advice: Advice) -> str:
    """Describe what free mixing would give, by length; it is no measurement of any mixer."""
    best = max(advice.shares, key=lambda s: s.bound)
    mixing = f"at {length(advice, best.length)} mixing takes {percent(best.mixing_share)} of the time in eager torch"
    wanted = f"{advice.worth:g}x (mixing at {percent(share_for(advice.worth))} of the time)"
    free = f"if it took none the model would be {best.bound:.2f}x as fast"
    return f"Bound: {mixing}; {free}. {_describe_crossover(advice, wanted)}"


def _describe_crossover(advice: Advice, wanted: str) -> str:
    crossing, inputs = advice.crossover, advice.host.inputs
    if crossing.tokens is None:
        return f"Nothing here says that the bound ever reaches {wanted}."
    n = inputs.length(crossing.tokens)
    at = length(advice, n)
    if crossing.how == "measured":
        return f"The bound reaches {wanted} at {at} already, the shortest length measured."
    if crossing.how == "between":
        how = "between measured lengths, by the power of the length that fits both"
        return f"The bound reaches {wanted} at about {at} ({how})."
    beyond = (
        f", more than the {inputs.limit:,} the model takes" if inputs.limit is not None and n > inputs.limit else ""
    )
    return f"By the cost formula the bound reaches {wanted} at about {at}{beyond}."


def describe_choice(advice: Advice, choice: Choice) -> str:
    """Say which candidate --data would write, and by which part of the rule."""
    reason = above_bound(advice, choice.row)
    noted = f" ({reason})" if reason else ""
    return f"Choice: {choice.row.mixer}, {choice.why}: {_describe_speed(advice, choice.row)}{noted}."


def _describe_nearness(nearness: Mapping[str, Nearness]) -> str:
    ranked = {label: near for label, near in nearness.items() if near.ranks}
    if not ranked:
        most = max(near.steps for near in nearness.values())
        return f"Quality: {NOT_RANKED}: the probe made {_steps(most)}, and fewer than {STEPS} rank nothing."
    name, near = min(ranked.items(), key=lambda item: item[1].after)
    return (
        f"Nearest to its attention after a probe of {_steps(near.steps)} is {name}: error {near.after:.3f}, "
        f"{near.before:.3f} before."
    )


def distillation(found: Record) -> str:
    """Describe the distillation: loss before and after."""
    before, after = found["loss_before"], found["loss_after"]
    effort = f"{found['steps']} steps in {found['seconds']:.0f} s"
    return (
        f"{found['mixer']} in {found['layers']} layers, distilled for {effort}: "
        f"{found['loss']} {before:.4f} before, {after:.4f} after. Written to {found['out']}."
    ) + f" {found['comparison']['text'].replace('distilled', 'Distilled', 1)}"
