"""Compare the public names with those of the last release: ``python -m benchmarks.check_api [REF]``.

Public are the names of docs/reference/api.md, and ``__all__`` of tokenmix, tokenmix.functional and tokenmix.contrib. A
name that is gone, or that takes fewer or other arguments than it did, is a break. The last release is the last commit
that changed the version, unless REF names another. A break passes once "Unreleased" in CHANGELOG.md has the name in
backticks: the class or function, or a member as ``Mixer.cost``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent
VERSION = "src/tokenmix/system/version.py"
PAGE = "docs/reference/api.md"
LISTS = ("tokenmix", "tokenmix.functional", "tokenmix.contrib")


def run_git(*args: str) -> str:
    """Return what git prints, without the newline; an empty text where it fails or there is no git."""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def find_release() -> str:
    """Return the commit of the last release; an empty text where this clone does not hold it."""
    return (
        ""
        if run_git("rev-parse", "--is-shallow-repository") != "false"
        else run_git("log", "-1", "--first-parent", "--format=%H", "--", VERSION)
    )


def load_package(root: Path) -> griffe.Object | griffe.Alias:
    """Read the package of a checkout without importing it."""
    return griffe.load("tokenmix", search_paths=[root / "src"], allow_inspection=False, resolve_aliases=True)


def list_public(root: Path, package: griffe.Object | griffe.Alias) -> set[str]:
    """Return the public names of a checkout, as paths with dots."""
    names = set(re.findall(r"^::: (\S+)", (root / PAGE).read_text(), re.MULTILINE))
    for path in LISTS:
        module = package if path == package.path else package.members.get(path.rpartition(".")[2])
        names |= {f"{path}.{name}" for name in (module and module.exports) or ()}
    return names


def mark_public(module: griffe.Object | griffe.Alias, names: set[str]) -> None:
    """Tell griffe which members of a module and of those below it are public."""
    for member in module.members.values():
        inside = any(name.startswith(f"{member.path}.") for name in names)
        member.public = member.path in names or (inside and not member.is_alias and member.is_module)
        if member.public and not member.is_alias and member.is_module:
            mark_public(member, names)


def read_announced(changelog: str) -> set[str]:
    """Return the names in backticks below "Unreleased" in a changelog."""
    unreleased = changelog.partition("\n## Unreleased\n")[2].partition("\n## ")[0]
    return {name for quoted in re.findall(r"`([^`]+)`", unreleased) for name in re.findall(r"[\w.]+", quoted)}


def find_breaks(before: Path, after: Path) -> Iterator[str]:
    """Yield one line for each break between two checkouts that the changelog of the later one does not announce."""
    old, new = load_package(before), load_package(after)
    mark_public(old, list_public(before, old))
    announced = read_announced((after / "CHANGELOG.md").read_text())
    for found in griffe.find_breaking_changes(old, new):
        member = found.obj.canonical_path.removeprefix(f"{found.obj.module.canonical_path}.")
        if not announced & {member, member.partition(".")[0]}:
            yield found.explain(griffe.ExplanationStyle.MARKDOWN).removeprefix("- ").replace(f"{before}/", "")


def main() -> None:
    """Print the breaks since the last release; exit with 1 if there are any."""
    ref = run_git("rev-parse", "--verify", "--quiet", f"{sys.argv[1]}^{{commit}}") if sys.argv[1:] else find_release()
    if not ref:
        print(f"check_api: skipped, this clone does not hold {sys.argv[1] if sys.argv[1:] else 'the last release'}")
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", ref, "src", PAGE], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        found = list(find_breaks(Path(folder), ROOT))
    print(*found, f"check_api: {len(found)} breaks since {run_git('log', '-1', '--format=%h of %as', ref)}", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
