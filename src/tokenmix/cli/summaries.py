"""What the verbs around a run print."""

from __future__ import annotations

import json as json_module
import sys
from typing import Any


def say(text: object, stream: Any = None) -> None:
    """Print a line, whatever the terminal's encoding and the names of files are: what cannot be written stands as \\xNN or \\uNNNN."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(str(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def print_summary(summary: dict[str, Any], json: bool) -> None:
    if json:
        say(json_module.dumps(summary))
        return
    unit = "images" if "images" in summary else "tokens"
    metric = next(name for name in summary if name.startswith("valid_"))
    say(
        f"{summary['run']}: {summary['step']} steps, {summary[unit]:,} {unit} in {summary['seconds']:.1f} s ({summary[f'{unit}_per_s']:,.0f} {unit}/s), "
        f"{score_text(metric.removeprefix('valid_'), summary[metric])}, peak {summary['peak_mib']:,.0f} MiB"
    )


def score_text(metric: str, value: float | None) -> str:
    """The last score on the validation split, in words."""
    if value is None:
        return "not evaluated"
    texts = {"bits_per_byte": f"{value:.4f} bits/byte", "bits_per_dim": f"{value:.4f} bits/dim", "top1": f"{100 * value:.2f} % top-1"}
    return f"{texts[metric]} on valid"
