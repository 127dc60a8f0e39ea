"""What differs between the configs of runs, and whether their scores can be compared."""

from __future__ import annotations

import json

from ...system.text import Table
from ...types import Record, Spec
from .runs import Run

ABSENT = "-"
"""What stands for a field that a run's config does not have."""
SPECS = 4
"""The most items of a list that are compared one by one; longer lists are compared as a whole."""
LONGEST = 120
"""Characters of a value that are shown."""


def differences_table(runs: list[Run]) -> Table | None:
    """Build the table of the fields in which the configs of the runs differ, a column per run; None if none does."""
    lengths = _lengths([run.config for run in runs])
    flat = [_fields(run.config, "", lengths) for run in runs]
    names = [name for name in dict.fromkeys(key for f in flat for key in f) if len({f.get(name) for f in flat}) > 1]
    if not names:
        return None
    rows = [[name, *(_shorten_text(f.get(name, ABSENT)) for f in flat)] for name in names]
    notes = ["All other fields of the configs are the same. A hyphen: the config of that run has no such field."]
    return Table("What differs between the runs", ["field", *(run.name for run in runs)], rows, notes)


def not_comparable(runs: list[Run]) -> str | None:
    """Return a warning if the scores of the runs cannot be compared, as steps, tokens, data or what was scored differ.

    None if they can.

    Runs that end after the same training time, and by nothing else, may differ in their steps and tokens.
    """
    loops = [_loop(run) for run in runs]
    times = {(loop.get("steps"), loop.get("max_seconds")) for loop in loops}
    same_time = len(times) == 1 and next(iter(times))[0] is None and next(iter(times))[1] is not None
    facts = {
        "steps": [_count(run, "step") for run in runs],
        "tokens": [_count(run, "tokens") for run in runs],
        "images": [_count(run, "images") for run in runs],
        "clouds": [_count(run, "clouds") for run in runs],
    }
    found = {} if same_time else {name: values for name, values in facts.items() if len(set(values)) > 1}
    data = [_data(run) for run in runs]
    if len({key for key, _ in data}) > 1:
        found["data"] = [name for _, name in data]
    for split in ("valid", "test"):
        scored = [each for run in runs if (each := run.scored_on(split)) is not None]
        if len(set(scored)) > 1:
            found[f"what the {split} score is of"] = scored
    if not found:
        return None
    said = [f"{name} ({', '.join(dict.fromkeys(values))})" for name, values in found.items()]
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"Not comparable: the runs differ in {listed}, so the score column does not compare their models."


def _loop(run: Run) -> Record:
    loop = run.config.get("train")
    return loop if isinstance(loop, dict) else {}


def _count(run: Run, name: str) -> str:
    return f"{run.largest(name) or 0:,.0f}"


def _data(run: Run) -> tuple[str, str]:
    """Return what tells the data of a run from that of others, and a name for it."""
    data = run.config.get("data", {})
    facts: Record = next(
        (run.env[name] for name in ("corpus", "images", "clouds") if isinstance(run.env.get(name), dict)), {}
    )
    source = str(data.get("path") or data.get("source", "unknown"))
    key = str(facts.get("sha256") or source)
    scored = {f"train.{field}": _loop(run).get(field) for field in ("eval_bytes", "eval_images")}
    parts: Record = {field: data.get(field) for field in ("split", "valid")} | scored
    rest = [f"{field} {_text(value)}" for field, value in parts.items() if value is not None]
    shown = f"{source} {key[:8]}" if facts.get("sha256") else source
    return json.dumps([key, parts], default=str), f"{shown}{', ' if rest else ''}{', '.join(rest)}"


def _lengths(values: list[object], prefix: str = "") -> dict[str, bool]:
    """Return, by dotted name, whether the lists of objects in all configs are short and of one length."""
    found: dict[str, bool] = {}
    for name in dict.fromkeys(key for value in values if isinstance(value, dict) for key in value):
        inner = [value[name] for value in values if isinstance(value, dict) and name in value]
        lists = [value for value in inner if isinstance(value, list)]
        if lists:
            found[prefix + name] = len({len(value) for value in lists}) == 1 and len(lists[0]) <= SPECS
        found |= _lengths(inner, f"{prefix}{name}.")
    return found


def _fields(value: object, name: str, lengths: dict[str, bool]) -> dict[str, str]:
    """Return the values inside of a config by dotted name, as text."""
    prefix = f"{name}." if name else ""
    if isinstance(value, dict) and (value or not name):
        return {k: v for key, inner in value.items() for k, v in _fields(inner, f"{prefix}{key}", lengths).items()}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        if lengths.get(name):
            return {k: v for i, each in enumerate(value) for k, v in _fields(each, f"{prefix}{i}", lengths).items()}
        specs = [_spec(each) for each in value]
        return {name: ", ".join(f"{specs.count(spec)} x {spec}" for spec in dict.fromkeys(specs))}
    return {name: _text(value)}


def _spec(spec: Spec) -> str:
    """Write an object of a list in short: ``aft_local(window=32)``."""
    options = ", ".join(f"{key}={_text(value)}" for key, value in spec.items() if key != "name")
    return f"{spec.get('name', 'unnamed')}({options})" if options else str(spec.get("name", "unnamed"))


def _text(value: object) -> str:
    if value in (None, "none"):  # an option that is off, as in the table of facts
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def _shorten_text(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
