"""Define the hooks of mkdocs: the navigation lists the pages of all mixers, and pages show tables they ask for.

The tables hold measurements, or are made from ``MIXERS``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from textwrap import indent
from typing import Any

from tokenmix.lab.papers.ours import measured_sweep
from tokenmix.lab.report.taxonomy import MARK, page_of, taxonomy
from tokenmix.lab.sweep.results import Results, markdown, results_table
from tokenmix.lab.sweep.sweep_page import comparison_table
from tokenmix.mixers import CORE, MIXERS
from tokenmix.system.text import MISSING, Table, number, size

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
EXPORTS = "<!-- exports -->"
ONNX_SPEED = "<!-- onnx speed -->"
SIGNALS = "<!-- signals -->"
SERVICE = "<!-- sentence service -->"
GENERATION = "<!-- generation service -->"
CONFORMANCE = "<!-- conformance -->"
CLIFFS = "<!-- cliffs -->"
DECODER = "<!-- decoder -->"
KERNEL_LIMITS = "<!-- kernel limits -->"
HYBRIDS = "<!-- hybrids -->"
FROZEN = "<!-- frozen features -->"
VIDEO = "<!-- video -->"
DETECTOR = "<!-- detector -->"
SWEEP = re.compile(r"<!-- sweep (\w+) -->")
"""A page asks for the table of a sweep by the name of its plan under benchmarks/sweeps."""
MADE = ("best rate", "parameters")
"""Columns of a sweep's table that say how a row was made: they are folded, with the tokens of its training."""
LOADED = ("seconds", "peak MiB")
"""Columns that depend on the machine and on what else ran on it: pages leave them out."""


def on_config(config: Any, **_: Any) -> Any:
    """Put the pages of the mixers into the navigation."""
    config.nav = with_mixers(config.nav)
    return config


def with_mixers(nav: list[Any]) -> list[Any]:
    """Return the navigation with the mixers' pages, one section per tier, below the section called Mixers."""
    tiers: dict[str, dict[str, str]] = {"core": {}, "extended": {}}
    for name, cls in MIXERS.items():
        page = page_of(name, ROOT / "docs/mixers")
        if page is not None and not any(page in known for known in tiers.values()):
            tiers[cls.facts.about.tier][page] = (
                (ROOT / f"docs/mixers/{page}.md").read_text().split("\n")[0].removeprefix("# ").split(":")[0]
            )
    sections = [
        {tier.capitalize(): [{title: f"mixers/{page}.md"} for page, title in pages.items()]}
        for tier, pages in tiers.items()
    ]
    return _add_sections(nav, sections)


def _add_sections(nav: list[Any], sections: list[Any]) -> list[Any]:
    """Return the navigation with more sections at the end of the one called Mixers, wherever it stands."""
    found: list[Any] = []
    for entry in nav:
        name, inside = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        more = sections if name == "Mixers" else []
        found.append({name: [*_add_sections(inside, sections), *more]} if isinstance(inside, list) else entry)
    return found


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where the page asks for them."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, taxonomy(ROOT / "docs/mixers"))
    for mark, (build, file) in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, build(RESULTS / file))
    return SWEEP.sub(_sweep_in_its_place, markdown)


def _sweep_in_its_place(found: re.Match[str]) -> str:
    """Return the table of a sweep, each line as far from the margin as its mark, which may stand in a folded part."""
    margin = found.string[: found.start()].rpartition("\n")[2]
    return indent(sweep(found[1]), margin if margin.isspace() else "").strip(" ")


def sweep(name: str) -> str:
    """Return what a sweep has found: scores and how they compare with the first row; folded, how they were made."""
    results = measured_sweep(name)
    if results is None:
        raise FileNotFoundError(f"docs: there is no plan benchmarks/sweeps/{name}.json.")
    plan = results.plan
    command = f"`tokenmix sweep benchmarks/sweeps/{name}.json`"
    done = [row for row in plan.rows if results.scores(row)]
    if not done:
        return f"*Not measured yet*: {command} trains {', '.join(f'`{row}`' for row in plan.rows)}.\n"
    found, compared = results_table(results), comparison_table(results)
    found = replace(found, rows=[line for line in found.rows if line[0] in done])
    made = ["row", *MADE, results.unit()]
    shown = ["row", *(name for name in found.columns if name not in {*made, *LOADED})]
    table = markdown(_join(replace(found, columns=shown, rows=select(found, shown)), compared))
    left = [f"`{row}`" for row in plan.rows if len(results.scores(row)) < len(plan.seeds)]
    notes = [note for note in (*found.notes, *compared.notes) if not note.startswith(LOADED)]
    notes += [f"Repeat it with {command}."] + [f"Seeds still to be run: {', '.join(left)}."] * bool(left)
    folded = markdown(Table(found.title, made, select(found, made), notes))
    parts = [table.split("\n", 2)[2].rstrip(), _caption(results, compared)]
    return "\n\n".join([*parts, '??? note "Rates, sizes and rules"', indent(folded, "    ")])


def select(table: Table, columns: list[str]) -> list[list[str]]:
    """Return these columns of the rows of a table."""
    places = [table.columns.index(column) for column in columns]
    return [[line[place] for place in places] for line in table.rows]


def _join(table: Table, compared: Table) -> Table:
    """Return the scores with each row's difference from the first; without notes and without columns that say nothing.

    The verdict has its column if any row has one.
    """
    margins = {
        line[0]: f" ± {line[3].removeprefix('+- ')}" if line[3].startswith("+-") else "" for line in compared.rows
    }
    columns = [compared.title.lower()] + ["verdict"] * _decides(compared)
    cells = {line[0]: [line[2] + margins[line[0]], line[1]][: len(columns)] for line in compared.rows}
    lines = [[*line, *cells.get(line[0], [""] * len(columns))] for line in table.rows]
    head = [*table.columns, *columns]
    kept = [i for i in range(len(head)) if any(line[i] not in ("", "-", MISSING) for line in lines)]
    return Table("", [head[i] for i in kept], [[line[i] for i in kept] for line in lines])


def _decides(compared: Table) -> bool:
    return any(line[1] != "cannot be tested" and line[1] != "not yet" for line in compared.rows)


def _caption(results: Results, compared: Table) -> str:
    """Return what the scores of a table are, and what they would be without a model."""
    better = "higher" if results.higher_is_better() else "lower"
    floors = ", ".join(f"{name} {value:.3f}" for name, value in results.yardsticks.items())
    said = f"Score: {results.metric()} on validation, {better} is better; n: seeds."
    said += " Rows are compared by beyond, which the note explains." if results.plan.lengths else ""
    said += f" For comparison: {floors}." if floors else ""
    return f"*{said}{'' if _decides(compared) else ' No row has a verdict: indicative.'}*"


def signals(results: Path) -> str:
    """Return the findings of ``benchmarks/signals.py``: signal by position, and gradients by role."""
    record: dict[str, Any] = json.loads(results.read_text())
    mixers, steps = record["mixers"], record["steps"]
    at = list(mixers["attention"]["start"])
    lines = [f"| mixer | {' | '.join(f't = {int(t):,}' for t in at)} | t = 256, {steps} steps later |"]
    lines += ["|---" * (len(at) + 2) + "|"]
    for name, found in mixers.items():
        cells = [f"{found['start'][t]:.3f}" if t in found["start"] else "" for t in at]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {found['after']['256']:.3f} |")
    lines += [
        "",
        "| mixer | matrices | the mixer's own tensors | embeddings | biases and norms |",
        "|---|---|---|---|---|",
    ]
    for name, found in mixers.items():
        pairs = [found["gradients"].get(role) for role in ("matrix", "mixer", "embedding", "vector")]
        cells = [" / ".join(map(_figures, pair)) if pair else "none" for pair in pairs]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(value: float) -> str:
    """Format a measurement with three figures and no power of ten: 0.317, 43.5, 5,890."""
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 3)


def exports(results: Path) -> str:
    """Return the findings of ``benchmarks/exports.py``: one line per mixer, core mixers first."""
    found: dict[str, Any] = json.loads(results.read_text())["mixers"]
    head = ["| mixer | batch | length | decode step | largest difference to torch |", "|---|---|---|---|---|"]
    return "\n".join(
        [*head, *(_export(name, found[name]) for name in sorted(found, key=lambda name: name not in CORE))]
    )


TOKENS = {
    "left_padding": "left padding",
    "right_padding": "right padding",
    "interior_padding": "masked in between",
    "decodes_after_left_padding": "decodes after left padding",
    "decode_equals_parallel": "decode = parallel",
    "prefill_in_any_cuts": "chunks = whole",
    "beams_reorder": "beams",
    "packed_by_positions": "packed: positions",
    "packed_by_lengths": "packed: lengths",
}
"""The promises of padding, packing and caches, which have a column each, and their heads."""
LOW = 0.9
"""The share below which a shape is on the page of the kernels."""
VERDICTS = {"kept": "yes", "broken": "**no**", "crashed": "**no**", "refused": "refused", "not applicable": "-"}


def conformance(results: Path) -> str:
    """Return the findings of ``benchmarks/conformance.py``: a line for each model, each function and each failure."""
    found = json.loads(results.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [f"Found with {versions}.", "", f"| model | {' | '.join(TOKENS.values())} | the other promises |"]
    lines += ["|---" * (len(TOKENS) + 2) + "|"]
    for name, report in found["models"].items():
        status = {r["promise"]: VERDICTS[r["status"]] for r in report["results"]}
        cells = [status.pop(promise) for promise in TOKENS]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_other_promises(status)} |")
    lines += ["", "| function | signature | promises |", "|---|---|---|"]
    for name, report in found["functions"].items():
        status = {r["promise"]: VERDICTS[r["status"]] for r in report["results"]}
        lines.append(f"| `{name}` | {report['subject'].partition(' as ')[2]} | {_other_promises(status)} |")
    lines += ["", '??? note "The smallest input that breaks each and how far it is off, and what refusals say"', ""]
    for name, report in {**found["models"], **found["functions"]}.items():
        broken = [r for r in report["results"] if VERDICTS[r["status"]] == "**no**"]
        lines += [f"    - `{name}`, {r['promise']}: `{r['reason']}`" for r in broken]
        refused = [r for r in report["results"] if r["status"] == "refused"]
        lines += [f"    - `{name}`, {r['promise']}, refused: {r['reason']}" for r in refused]
    return "\n".join(lines)


def _other_promises(status: dict[str, str]) -> str:
    """Return how many promises are kept of those that apply, and the names of the others."""
    applied = [name for name, verdict in status.items() if verdict != "-"]
    kept = sum(status[name] == "yes" for name in applied)
    missing = [f"{status[name]}: {name}" for name in applied if status[name] != "yes"]
    return ", ".join([f"{kept} of {len(applied)}", *missing])


def _against(ms: dict[str, float], other: dict[str, float]) -> str:
    """Return how many times as fast as another a file is, its milliseconds, and their quartiles."""
    numbers = f"{_figures(ms['median'])} ms, {_figures(ms['low'])} to {_figures(ms['high'])}"
    return f"**{other['median'] / ms['median']:.2f}** ({numbers})"


def onnx_speed(results: Path) -> str:
    """Return the findings of ``benchmarks/onnx_speed.py``: a line for each mixer and direction."""
    found = json.loads(results.read_text())
    ways = ("causal", "bidirectional")
    lengths = sorted(found[ways[0]], key=int)
    lines = [f"| mixer | | {' | '.join(f'{int(n):,} tokens' for n in lengths)} |", "|---|---|" + "---|" * len(lengths)]
    for way in ways:
        for name in found[way][lengths[0]]:
            cells = (_against(found[way][n][name], found[way][n]["attention"]) for n in lengths)
            lines.append(f"| `{name}` | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cliffs(results: Path) -> str:
    """Return the findings of ``benchmarks/cliffs.py``: how many cells were timed, and a line for each slow one."""
    found = json.loads(results.read_text())
    cells = found["rows"] + found["half"] + found["grid"]
    paths = [c for c in cells if c["share_of_better"] < LOW]
    beside = [c for c in cells if c.get("share_of_attention", 1.0) < LOW]
    said = (
        f"Of {len(cells)} shapes, `auto` is slower than {LOW} of the better of its two paths at {len(paths)}, and than "
    )
    said += f"{LOW} of fused attention, where that has more to multiply, at {len(beside)}:"
    heads = ["operation", "batch x tokens x features, heads", "", "auto, ms", "eager", "kernel", "attention"]
    lines = [said, "", *_head(heads)]
    for c in paths + [c for c in beside if c not in paths]:
        size = " x ".join(f"{n:,}" for n in c["sizes"][:3]) + f", {c['sizes'][3]}"
        how = ", ".join([c["dtype"], *["causal"] * c["causal"], *["with backward"] * c["backward"]])
        ms = [_figures(c[way]) if way in c else "" for way in ("auto", "eager", "cpu", "attention")]
        lines.append(_row([f"`{c['op']}`", size, how, *ms]))
    return "\n".join(lines)


def decoder(results: Path) -> str:
    """Return the findings of ``benchmarks/decoder.py``: a line for each model and context, and its texts."""
    found = json.loads(results.read_text())
    ways = {"decoder": "float32", "decoder, bfloat16": "bfloat16", "decoder, int8": "int8", "extend": "`extend`"}
    heads = ["size", "layers", "tokens before", *ways.values(), "ONNX Runtime", "times as fast as ONNX Runtime"]
    lines = _head(heads)
    for row in found["speed"]["rows"]:
        us = [f"{row['us'][name]:,.0f}" for name in (*ways, "onnxruntime")]
        lines.append(_row([row["size"], row["row"], f"{row['context']:,}", *us, f"{row['times_onnxruntime']:.1f}"]))
    if "text" not in found:
        return "\n".join(lines)
    texts = [row for row in found["text"]["rows"] if row["weights"] == "float32"]
    narrow = [row["relative_drift"] for row in found["text"]["rows"] if row["weights"] == "int8"]
    others, close = (sum(row[name] for row in texts) for name in ("others", "others_close"))
    said = f"Greedy texts of {texts[0]['tokens']:,} tokens by {len(texts)} models, each token by the decoder and by "
    said += f"`extend`: {others} tokens differ, {close} of them where the two largest logits are closer than 0.0001. "
    said += (
        f"Logits differ by at most {max(row['relative_drift'] for row in texts):.0e} of their norm, with weights in "
    )
    said += f"int8 by {min(narrow):.2f} to {max(narrow):.2f}."
    return "\n".join([*lines, "", said])


def kernel_limits(results: Path) -> str:
    """Return what ``tokenmix.kernels.triton.limits`` computes: a line for each kernel of a form, and one for all."""
    rows = json.loads(results.read_text())["rows"]
    heads = ["kernel", "launches", "MB", "GFLOP", "limit, us", "programs", "at once", "waves", "excepted from"]
    lines = _head(heads)
    for form in dict.fromkeys(row["form"] for row in rows):
        own = [row for row in rows if row["form"] == form]
        lines.append(_row([f"**{form}**", *_work(own, len(own)), "", "", "", ""]))
        for kernel in dict.fromkeys(row["kernel"] for row in own):
            same = [row for row in own if row["kernel"] == kernel]
            last, why = same[-1], {rule for row in same for rule in row["excepted"]}
            shape = ["", "", ""]  # of a function of torch
            if last["blocks"]:
                shape = [f"{last['programs']:,}", str(last["blocks"]), f"{last['waves']:,.1f}"]
            shape.append(", ".join(sorted(why)))
            lines.append(_row([f"`{kernel}`", *_work(same, len(same)), *shape]))
    reasons = {(row["form"], row["kernel"], why): rule for row in rows for rule, why in row["excepted"].items()}
    said = {}
    for form, kernel, why in reasons:
        said.setdefault(why, []).append(f"`{kernel}` of {form}")
    return "\n".join([*lines, "", *(f"- {', '.join(dict.fromkeys(who))}: {why}." for why, who in said.items())])


def _work(rows: list[dict[str, Any]], launches: int) -> list[str]:
    """Return the cells of launches together: how many, bytes, FLOPs, and the least time."""
    limit = sum(row["limit_us"] for row in rows)
    moved, flops = (sum(row[name] for row in rows) for name in ("bytes", "flops"))
    return [str(launches), f"{moved / 1e6:,.0f}", f"{flops / 1e9:,.0f}", f"{limit:,.0f}"]


def hybrids(results: Path) -> str:
    """Return the findings of ``benchmarks/cpu_kernels.py``: a line for each layer, pass and length; a model."""
    found = json.loads(results.read_text())
    heads = ["layer", "pass", "tokens", "before, ms", "after, ms", "times as fast", "peak MiB before", "after"]
    lines = _head(heads)
    for row in found["rows"]:
        cells = [f"`{row['layer']}`", row["what"], f"{row['tokens']:,}"]
        if "left_out" in row:
            lines.append(_row([*cells, f"not run: {row['left_out']}", "", "", "", ""]))
            continue
        t, m = row["seconds"], row.get("peak_mib")
        cells += [_figures(1e3 * t["before"]), _figures(1e3 * t["after"]), f"{t['before'] / t['after']:.1f}"]
        lines.append(_row([*cells, *(f"{m[who]:,.0f}" if m else "" for who in ("before", "after"))]))
    if "model" not in found:
        return "\n".join(lines)
    heads = ["what", "layers", "seconds", "peak MiB above weights", "loss"]
    lines += ["", *_head(heads)]
    for row in found["model"]:
        loss = f"{row['loss']:.4f}" if "loss" in row else ""
        lines.append(_row([row["what"], row["who"], f"{row['seconds']:,.0f}", f"{row['peak_mib']:,}", loss]))
    return "\n".join(lines)


def frozen_features(results: Path) -> str:
    """Return the findings of ``benchmarks/frozen_features.py``: probes by depth, and norms by step."""
    found = json.loads(results.read_text())
    rows = {n: [found["rows"][f"r{n}-s{seed}"] for seed in found["seeds"]] for n in found["registers"]}
    kinds = list(rows[max(rows)][0]["linear"])
    heads = ["after layer", "registers", *(f"{kind}: linear / k-NN" for kind in kinds)]
    lines = _head(heads)
    for layer in range(len(rows[0][0]["linear"][kinds[0]])):
        for n, runs in rows.items():
            cells = ["before" if layer == 0 else str(layer - 1), str(n)]
            for kind in kinds:
                both = ([run[how].get(kind) for run in runs] for how in ("linear", "nearest"))
                cells.append(" / ".join(_spread([each[layer] for each in those]) for those in both if all(those)))
            lines.append(_row(cells))
    steps = list(rows[0][0]["norms"])
    norms = [f"step {int(step):,}" for step in steps]
    lines += ["", *_head(["registers", "top-1", *norms])]
    for n, runs in rows.items():
        cells = [str(n), _spread([run["valid_top1"] for run in runs])]
        for step in steps:
            pair = (mean(run["norms"][step][which][-1] for run in runs) for which in ("median", "largest"))
            cells.append(" / ".join(f"{norm:.1f}" for norm in pair))
        lines.append(_row(cells))
    return "\n".join(lines)


def _spread(shares: list[float]) -> str:
    """Return mean and standard deviation of shares in per cent."""
    return f"{100 * mean(shares):.1f} ± {100 * stdev(shares):.1f}"


def video(results: Path) -> str:
    """Return the findings of ``benchmarks/video_small.py``: a line for each mixer."""
    found = json.loads(results.read_text())
    lines = _head(["mixer", f"of {found['clips']:,} clips right", "cross-entropy", "CPU seconds"])
    for name, row in found["rows"].items():
        cells = [f"{100 * row['accuracy']:.1f} %", f"{row['loss']:.3f}", f"{row['cpu_seconds']:.0f}"]
        lines.append(_row([f"`{name}`", *cells]))
    return "\n".join(lines)


def detector(results: Path) -> str:
    """Return the findings of ``benchmarks/detector_small.py``: a line for each backbone."""
    if not results.is_file():
        return "*Not measured yet.*"
    found = json.loads(results.read_text())
    lines = _head(["backbone", "parameters", "average precision at an overlap of 0.5, %", "rate", "CPU minutes"])
    for name, row in found["rows"].items():
        minutes = sum(row["cpu_seconds"]) / 60
        cells = [f"{row['parameters']:,}", _spread(row["AP"]), f"{row['rate']:g}", f"{minutes:.0f}"]
        lines.append(_row([f"`{name}`", *cells]))
    return "\n".join(lines)


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), "|---" * len(cells) + "|"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def sentence_service(results: Path) -> str:
    """Return the findings of ``benchmarks/sentence_service.py``: a line for each encoder, and one for each time."""
    rows = json.loads(results.read_text())["rows"]
    kinds = list(rows[0]["rank_correlation"])
    lines = [f"| replaced | {' | '.join(kinds)} | processor minutes |", "|---|" + "---|" * (len(kinds) + 1)]
    for row in rows:
        cells = ("{before:.3f}, {after:.3f}".format(**row["rank_correlation"][kind]) for kind in kinds)
        name = f"last {row['last']}: `{row['mixer']['name']}`"
        lines.append(f"| {name} | {' | '.join(cells)} | {row['cpu_seconds'] / 60:.0f} |")
    lines += ["", "| replaced | runtime | tokens | times as fast, median and quartiles |", "|---|---|---|---|"]
    for row in rows:
        for timed in row["times"]:
            gain = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**timed)
            name = f"last {row['last']}: `{row['mixer']['name']}`"
            lines.append(f"| {name} | {timed['runtime']} | {timed['tokens']:,} | {gain} |")
    return "\n".join(lines)


def generation_service(results: Path) -> str:
    """Return the findings of ``benchmarks/generation_service.py``: bits per byte, then times and bytes."""
    found = json.loads(results.read_text())
    lines = ["| model | bits per byte after replacement | after training |", "|---|---|---|"]
    lines += [f"| original | | {found['original']['bits_per_byte']['mean']:.3f} |"]
    lines += [f"| original, {found['more']['steps']:,} steps more | | {found['more']['bits_per_byte']['mean']:.3f} |"]
    for row in found["rows"]:
        before, after = (row["bits_per_byte"][when] for when in ("before", "after"))
        above = f"{after['above_more']:+.3f} ± {2 * after['error']:.3f} against the line above"
        name = f"last {row['last']}: `{row['mixer']['name']}`, {sum(row['steps']):,} steps"
        lines.append(f"| {name} | {before['mean']:.3f} | {after['mean']:.3f} ({above}) |")
    head = (
        "| replaced | runtime | batch | tokens before | times as fast, median and quartiles | KV cache | with states |"
    )
    lines += ["", head, "|---|---|---|---|---|---|---|"]
    for row in found["rows"]:
        for timed in row["rows"]:
            gain = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**timed)
            held = " | ".join(size(timed["cache_bytes"][name]) for name in ("original", "new"))
            at = f"{timed['runtime']} | {timed['batch']} | {timed['context']:,}"
            lines.append(f"| last {row['last']}: `{row['mixer']['name']}` | {at} | {gain} | {held} |")
    return "\n".join(lines)


def _export(name: str, found: dict[str, Any]) -> str:
    whole, step = found["whole"], found["decode"]
    if "refused" in whole:
        return f"| `{name}` | | | | not exported: {whole['refused']} |"
    low, high = whole["length"]
    length = (
        f"{low} only"
        if low == high
        else f"{low} to {high}{', padded' if whole['padded'] else ''}"
        if high
        else f"from {low}"
    )
    why = step.get("refused", "").removeprefix("export: ")
    decodes = "none: " + ("it does not stream" if "no streaming form" in why else why) if why else "yes"
    worst = max(part["difference"] for part in (whole, step) if "refused" not in part)
    return f"| `{name}` | {'any' if whole['batch'] is None else whole['batch']} | {length} | {decodes} | {worst:.1e} |"


TABLES = {
    EXPORTS: (exports, "exports.json"),
    ONNX_SPEED: (onnx_speed, "onnx_speed.json"),
    SERVICE: (sentence_service, "sentence_service.json"),
    GENERATION: (generation_service, "generation_service.json"),
    CONFORMANCE: (conformance, "conformance.json"),
    SIGNALS: (signals, "signals.json"),
    CLIFFS: (cliffs, "cliffs.json"),
    DECODER: (decoder, "decoder.json"),
    KERNEL_LIMITS: (kernel_limits, "triton_limits.json"),
    HYBRIDS: (hybrids, "cpu_kernels.json"),
    FROZEN: (frozen_features, "frozen_features.json"),
    VIDEO: (video, "video_small.json"),
    DETECTOR: (detector, "detector_small.json"),
}
"""Mark -> what builds the table in its place, and from which file."""
