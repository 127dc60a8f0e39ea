"""Sizes that fit nowhere, and texts, runs and file systems as nobody had tried them."""

from __future__ import annotations

from pathlib import Path

from . import attempt, result_of_command

TINY = "--model.dim 8 --model.layers 1 --data.seq_len 16 --model.max_len 16 --train.steps 4 --train.batch_size 2"
TINY += " --train.eval_every 2 --train.save_every 2 --train.log_every 1 --train.eval_bytes 100 --train.sample_bytes 4"


def _train(*more: str) -> str:
    """Train a small model of bytes."""
    Path("text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    return result_of_command("train", "text", "--data", "text.txt", *TINY.split(), *more)


@attempt("1", "A layer of a petabyte on the command line")
def layer_of_a_petabyte() -> str:
    """No machine has it."""
    return _train("--model.mlp_ratio", "1e13")


@attempt("2", "A million layers")
def million_layers() -> str:
    """Each of them is built."""
    return _train("--model.layers", "1000000")


@attempt("3", "A batch of a billion rows")
def billion_rows() -> str:
    """Each of them is drawn."""
    return _train("--train.batch_size", "1000000000")


@attempt("4", "A learned position for each of 10^13 tokens in an evaluation")
def resized_beyond_memory() -> str:
    """The model is stretched first."""
    _train("--out", "run")
    return result_of_command("eval", "run", "--seq-len", "10000000000000", "--resize")


def _warned(recipe: str, changes: dict[str, object]) -> str:
    from tokenmix.lab.recipes import RECIPES
    from tokenmix.lab.train.idle_settings import idle_settings

    return "; ".join(idle_settings(RECIPES[recipe].config().override(changes))) or "no word"


@attempt("5", "Shards on one process, samples of a masked model, spans of a masked model, symbols of recall")
def idle() -> str:
    """None of them is read."""
    found = [_warned("text", {"train.shard": "fsdp"}), _warned("masked", {"train.samples": 3})]
    found += [_warned("masked", {"data.span": 5.0}), _warned("recall", {"data.symbols": 12})]
    return " | ".join(found)


def _read(name: str, content: str | bytes, kind: str = "labelled", **options: object) -> str:
    """Say what is found in a file of texts."""
    from tokenmix.lab import data

    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        found = getattr(data, f"open_{kind}")(name, **options)
    except ValueError as why:
        return f"{type(why).__name__}: {str(why)[:160]}"
    rows = found[0] if isinstance(found, tuple) else found
    return "; ".join(rows.inventory.lines())[:200]


TABLE = "text\tlabel\n" + "".join(f"text {i}\t{'pos' if i % 2 else 'neg'}\n" for i in range(200))
ENDLESS = "9" * 5000


@attempt("6", "An empty line at the end of a table")
def empty_end() -> str:
    """Editors leave it."""
    return _read("a.tsv", TABLE + "\n")


@attempt("7", "The label among the columns of texts")
def label_read() -> str:
    """The model would read what it is to tell."""
    return _read("a.tsv", TABLE, columns=("text", "label"))


@attempt("8", "Labels and numbers of lines of 5,000 digits")
def endless_digits() -> str:
    """Python turns no more than 4,300 into a number."""
    rows = "".join(f"t {i}\t{(ENDLESS, 1)[i % 2]}\n" for i in range(90))
    labels = _read("a.tsv", f"text\tlabel\n{rows}")
    return f"{labels[:90]} | {_read('a.txt', f'1 hi{chr(9)}ho{chr(10)}{ENDLESS} hi{chr(9)}ho{chr(10)}', 'parallel')}"


@attempt("9", "A model, a zlib stream and UTF-16 without its mark as a corpus")
def no_text() -> str:
    """None of them is text."""
    import zlib

    found = [_read("a.txt", b"GGUF\3\0\0\0" + bytes(5000), "corpus")]
    found += [_read("b.txt", zlib.compress(b"to be or not to be. " * 400), "corpus")]
    return " | ".join([*found, _read("c.txt", ("cat\n" * 500).encode("utf-16-le"), "corpus")])


@attempt("10", "Train.tsv, and a table whose header is eng, deu")
def names_in_capitals() -> str:
    """The first is read, the second is a header and no pair."""
    Path("f").mkdir()
    for name in ("Train", "Dev", "Test"):
        Path("f", f"{name}.tsv").write_text(TABLE)
    from tokenmix.lab.data import open_labelled

    try:
        found = open_labelled("f")[0].inventory.lines()[0]
    except ValueError as why:
        found = str(why)
    pairs = "".join(f"cat {i}\tKatze {i}\n" for i in range(100))
    return f"{found[:100]} | {_read('a.tsv', f'eng{chr(9)}deu{chr(10)}{pairs}', 'parallel')}"


@attempt("11", "Pipes in place of a run's config, a checkpoint's manifest and a tokenizer")
def pipes() -> str:
    """Nobody writes into them."""
    import os
    import shutil

    _train("--out", "run")
    said = []
    for name in ("config.json", "checkpoints/step_00000004/manifest.json"):
        shutil.copytree("run", f"copy{len(said)}")
        Path(f"copy{len(said)}", name).unlink()
        os.mkfifo(f"copy{len(said)}/{name}")
        said.append(result_of_command("eval", f"copy{len(said)}"))
    return " | ".join(said)


@attempt("12", "A kind of data that is an object")
def kind_of_nothing() -> str:
    """No table has it."""
    import json

    _train("--out", "run")
    config = json.loads(Path("run/config.json").read_text())
    config["data"]["kind"] = {}
    Path("run/config.json").write_text(json.dumps(config))
    return result_of_command("eval", "run")


@attempt("13", "A lock on a disk that is gone (EIO), a flush on a server that is gone (ENOTCONN)")
def gone() -> str:
    """Neither is a file system that gives no locks or does not flush."""
    import errno
    import fcntl
    import os
    import warnings

    from tokenmix.system import files, lock

    def failing(number: int) -> object:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    said = []
    fcntl.flock, os.fsync = failing(errno.EIO), failing(errno.ENOTCONN)
    for act in (lambda: lock.hold_lock(Path(), "busy").__enter__(), lambda: files.write_file(Path("a"), b"x")):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                act()
                said.append(f"goes on, {len(told)} warning")
            except OSError as why:
                said.append(f"error: {why.strerror}")
    return " | ".join(said)
