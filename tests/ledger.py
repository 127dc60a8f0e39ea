"""What the ledger holds as printed, for tests of the models that it is about."""

from __future__ import annotations

from tokenmix.lab.papers import PAPERS


def printed(key: str, section: str) -> dict[str, str]:
    """Return the printed numbers of one section of a paper, by their names."""
    return {n.name: n.printed for claim in PAPERS[key].claims if claim.section == section for n in claim.numbers}
