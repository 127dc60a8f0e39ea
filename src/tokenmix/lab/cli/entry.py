"""The entry point of `tokenmix VERB`.

User errors are one line on stderr and exit code 2; with --debug they show their traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from dataclasses import fields
from functools import partial
from itertools import takewhile
from types import ModuleType
from typing import Any

from ...errors import MixerError
from ...system.malloc import keep_memory_here
from ...system.memory import KINDS, lack_of_memory
from ...system.text import printable
from ...system.version import __version__
from ...types import Options
from .output import say

OVERRIDE = re.compile(r"--([a-z_-]+(?:\.[a-z0-9_-]+)+)(?:=(.*))?", re.DOTALL)
BOX = "╭╮╰╯│─|+- \n"
LONGEST = 300
"""Characters of a parser's message that are shown."""
ABOUT = (
    "Token mixers for PyTorch: train, evaluate, compare.\n\n"
    "Run `tokenmix VERB --help` for the options of a verb, `tokenmix --version` for the version; "
    "add --debug to see the traceback of an error."
)
CHANGING = ("train", "resume", "sweep")
"""The verbs that take ``--a.b value`` for fields of the config."""
KEEPING = ("train", "resume", "sweep", "advise", "bench")
"""The verbs that keep freed memory, where the process is their own."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit code: 0 for success, 1 for a finding such as a broken promise, 2 for a user error, 130 after Ctrl-C.
    """
    own_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, set())
            return _dispatch(argv, own_process)
    except BrokenPipeError:  # `tokenmix list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as why:  # a training run says what is saved, and how to go on
        usual = "stopped; `tokenmix resume DIR` continues a training run from its last checkpoint."
        print(" ".join(map(str, why.args)) or usual, file=sys.stderr)
        return 130
    except (OSError, *KINDS) as why:
        lacking = lack_of_memory(why)
        if debug or not (lacking or isinstance(why, (MixerError, OSError))):
            raise
        said = f"{argv[0]}: {lacking}; give smaller sizes." if lacking else _one_line(why)
        sys.stderr.write(f"error: {printable(said)}\n")  # in one piece: ranks share a terminal
        return 2


def _dispatch(argv: list[str], own_process: bool) -> int:
    if argv[:1] == ["--version"]:
        say(f"tokenmix {__version__}")
        return 0
    try:
        import tyro
    except ImportError:
        raise MixerError("the command line needs the extra 'train': pip install 'tokenmix[train]'.") from None
    from ...system.config import nearest
    from ...system.modules import typed_names
    from .fields import recipe_help
    from .verbs import OTHER_VERBS, VERBS

    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        if usage := OTHER_VERBS.get(argv[0]):
            verb = " ".join(takewhile(str.islower, usage.split()))
            raise MixerError(f"`{argv[0]}` is `{verb}` here: tokenmix {usage}.")
        raise MixerError(f"there is no verb {argv[0]!r}; {nearest(argv[0], VERBS)}.")
    if not argv:
        argv = ["--help"]
    argv, changes = take_overrides(argv)
    help_of_recipe = recipe_help(argv) if argv[0] == "train" and {"-h", "--help"} & set(argv) else ""
    chosen = _parse(tyro, VERBS, argv)
    if isinstance(chosen, int):
        if help_of_recipe:
            say(help_of_recipe)
        return chosen
    if own_process and argv[0] in KEEPING and getattr(chosen, "keep_memory", True):
        keep_memory_here()
    with typed_names() if argv[0] in ("train", "convert") else contextlib.nullcontext():
        return chosen.run(changes) if argv[0] in CHANGING else chosen.run()


def _parse(tyro: ModuleType, verbs: dict[str, type], argv: list[str]) -> Any:
    """Return the verb with its options, or the exit code of --help."""
    from .fields import meant_field, unknown_option
    from .look import LOOKS

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(verbs, args=argv, prog="tokenmix", description=ABOUT)
    except SystemExit as end:
        if not end.code:
            return 0
        lines = [line.rstrip(BOX).lstrip(BOX.replace("-", "")) for line in errors.getvalue().splitlines()]
        lines = [line for line in lines if re.search(r"\w", line)]  # a terminal without boxes has rules of hyphens
        if argv[0] in CHANGING and (meant := meant_field(argv, (f.name for f in fields(verbs[argv[0]])))):
            raise MixerError(f"{argv[0]}: {meant}") from None
        name = " ".join(argv[:2]) if argv[0] == "look" and argv[1:] and argv[1] in LOOKS else argv[0]
        verb = LOOKS[argv[1]] if name != argv[0] else verbs.get(name)
        if verb is not None and (unknown := unknown_option(argv, verb)):
            raise MixerError(f"{name}: {unknown}") from None
        told = [line for line in lines[1:] if not line.startswith(("For full helptext", "tokenmix "))]
        body = " ".join(told).replace(" (required)", "") or lines[0]
        body = body if len(body) <= LONGEST else f"{body[:LONGEST]} ..."
        raise MixerError(f"{name}: {body.rstrip('.')}; see `tokenmix {name} --help`.") from None


def take_overrides(argv: list[str]) -> tuple[list[str], Options]:
    """Separate the verb's own options from ``--a.b value`` and ``--a.b=value``, which set fields of the config.

    Returns:
        The remaining arguments, and the fields with their values.
    """
    if not argv or argv[0] not in CHANGING:
        return argv, {}
    from ..train.config import parse_value
    from .fields import check_json

    rest: list[str] = []
    changes: Options = {}
    items = iter(argv)
    for item in items:
        match = OVERRIDE.fullmatch(item)
        if match is None:
            rest.append(item)
            continue
        value = match[2] if match[2] is not None else next(items, None)
        if value is None:
            raise MixerError(f"{item} needs a value.")
        field = match[1].replace("-", "_")
        changes[field] = parse_value(value)
        check_json(f"--{match[1]}", field, value, changes[field])
    return rest, changes


def _one_line(why: Exception) -> str:
    if isinstance(why, OSError) and not isinstance(why, MixerError):
        return f"{why.filename}: {why.strerror}" if why.filename is not None else (why.strerror or str(why))
    return " ".join(str(why).split())


def _show_warning(shown: set[str], message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning, once: data that is opened twice would warn twice."""
    if str(message) not in shown:
        shown.add(str(message))
        print(f"warning: {printable(str(message))}", file=sys.stderr)
