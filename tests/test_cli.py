"""The command line: what works prints, what does not is one line and exit code 2."""

from __future__ import annotations

import ast
import dataclasses
import errno
import inspect
import io
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import types
import warnings

import pytest
import tyro

import tokenmix
from tokenmix import MIXERS, MixerError
from tokenmix.lab import cli, data
from tokenmix.lab.cli import entry, output
from tokenmix.lab.cli.entry import take_overrides
from tokenmix.lab.cli.extras import EXTRAS
from tokenmix.lab.cli.look import LOOKS
from tokenmix.lab.cli.verbs import OTHER_VERBS, VERBS
from tokenmix.system.text import si, size

TINY = [
    "--row",
    "attention",
    "--model.dim",
    "16",
    "--model.max_len",
    "32",
    "--data.seq_len=32",
    "--train.steps",
    "4",
    "--train.batch_size",
    "2",
]
SPEED = [
    "--train.eval-bytes",
    "300",
    "--train.sample_bytes",
    "4",
    "--train.save_every",
    "2",
    "--model.layers",
    "1",
    "--train.threads",
    "1",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the cat sat on the mat. " * 400)
    return str(path)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory) -> str:
    out = str(tmp_path_factory.mktemp("cli") / "run")
    assert cli.main(["train", "text", "--data", text, "--out", out, *TINY, *SPEED]) == 0
    return out


def refused(capsys, *argv: str) -> str:
    """The one line that a wrong command prints."""
    assert cli.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_a_run_without_a_directory_has_the_name_of_what_was_asked(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    asked = ["train", "text", "--data", text, "--train.shard", "none", *TINY, *SPEED]
    assert cli.main(asked) == 0
    assert (tmp_path / "runs" / "text_attention" / "config.json").is_file()
    capsys.readouterr()
    said = refused(capsys, *asked)
    assert "runs/text_attention" in said
    assert "resume" in said
    config = tmp_path / "runs" / "text_attention" / "config.json"
    config.write_text(config.read_text().replace('"shard": null', '"shard": "none"'))  # as older runs have it
    assert '"shard": "none"' in config.read_text()
    assert cli.main(["resume", "runs/text_attention"]) == 0


def test_the_whole_path(run, capsys):
    assert cli.main(["resume", run, "--train.steps", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
    assert cli.main(["eval", run, "--split", "test", "--stride", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["split"], result["stride"], result["bytes"]) == ("test", 8, 480)
    assert cli.main(["eval", run]) == 0
    assert "bits/byte over 480 bytes" in capsys.readouterr().out
    assert (
        cli.main(
            ["sample", run, "--bytes", "10", "--prompt", "the ", "--seed", "1", "--temperature", "0", "--step", "best"]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("the ")
    assert cli.main(["sample", run, "--bytes", "10", "--json", "--top-k", "3", "--top-p", "0.9"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "\n"


def test_overrides_reach_the_config(run, text):
    with open(os.path.join(run, "config.json")) as f:
        config = json.load(f)
    assert (
        config["model"]["dim"],
        config["data"]["seq_len"],
        config["train"]["eval_bytes"],
        config["data"]["source"],
    ) == (16, 32, 300, text)
    argv, changes = take_overrides(
        [
            "train",
            "text",
            "--model.mixers",
            '[{"name": "attention"}]',
            "--data.path=none",
            "--optim.lr",
            "1e-4",
            "--json",
        ]
    )
    assert argv == ["train", "text", "--json"]
    assert changes == {"model.mixers": [{"name": "attention"}], "data.path": None, "optim.lr": 1e-4}


def test_list(capsys):
    assert cli.main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["mixers"]) == set(MIXERS)
    assert found["mixers"]["aft_local"]["options"]["window"] == "required"
    assert "causal" in found["mixers"]["attention"]["can"]
    assert "attn_mask" not in found["mixers"]["aft_simple"]["can"]
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} [" in text for name in MIXERS)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "``" not in text
    assert all(f"  {name}: " in text for name in ("text", "aft_enwik8", "stdlib"))
    tables = [value for name, value in vars(data).items() if name.endswith("_SETS") or name == "CORPORA"]
    assert len(tables) == 7
    assert all(f"  {name}: " in text for table in tables for name in table)
    assert found["mixers"]["aft_simple"]["state"] == "constant"
    assert found["mixers"]["attention"]["state"] == "grows with T"
    assert {m["tier"] for m in found["mixers"].values()} == {"core", "extended"}
    assert all(m["paper"] and m["kind"] and m["time"] and m["space"] for m in found["mixers"].values())


def test_list_cost(capsys):
    assert cli.main(["list", "--cost", "512", "--dim", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(MIXERS)
    assert not [name for name, entry in found.items() if "missing" in entry]
    assert found["attention"]["mixing"] == 4 * 512 * 512 * 64
    assert found["attention"]["projections"] == 8 * 512 * 64 * 64
    assert cli.main(["list", "--cost", "512"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in MIXERS)
    assert max(len(line) for line in text.splitlines()) <= 140
    assert len({len(line) for line in text.splitlines()[2:]}) == 1  # every row as wide as the heading
    assert cli.main(["list", "--cost", "0"]) == 2


@pytest.mark.parametrize(
    ("n", "flops", "byte"),
    [
        (0, "0", "0 B"),
        (999, "999", "999 B"),
        (1536, "1.54 k", "1.50 KiB"),
        (999_600, "1.00 M", "976 KiB"),
        (15e9, "15.0 G", "14.0 GiB"),
        (5e15, "5000 T", "4656613 GiB"),
    ],
)
def test_costs_are_written_in_three_figures(n, flops, byte):
    assert (si(n), size(n)) == (flops, byte)


def test_list_prints_waivers(capsys, monkeypatch):
    cls, facts = MIXERS["aft_simple"], MIXERS["aft_simple"].facts
    monkeypatch.setattr(cls, "facts", dataclasses.replace(facts, waivers={"fp16": "a reason"}))
    assert cli.main(["list"]) == 0
    assert "waives  fp16: a reason" in capsys.readouterr().out
    monkeypatch.setattr(cls, "facts", dataclasses.replace(facts, waivers={"fp16": "a reason", "bf16": "a reason"}))
    assert cli.main(["list"]) == 0
    assert "waives  fp16, bf16: a reason" in capsys.readouterr().out


def test_list_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(len(line) > 40 for line in lines) < len(lines) / 20  # those that hold a word that cannot be cut
    assert max(len(line) for line in lines) <= 80


def test_costs_of_a_length_beyond_memory(capsys):
    """Nothing of that size is made: what needs a table says so, all else has a formula."""
    assert cli.main(["list", "--cost", "99999999999999"]) == 0
    said = capsys.readouterr().out
    assert "AFTFull: max_len must be an integer or None of at most 2147483647, got 99999999999999" in said
    assert "aft_simple" in said


def test_doctor(capsys, monkeypatch):
    monkeypatch.setattr("tokenmix.lab.cli.doctor.try_extras", lambda: (dict.fromkeys(EXTRAS, "ok"), ""))
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"{len(MIXERS)} mixers" in text
    assert "all well" in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] == []
    assert set(found["forward"].values()) == {"ok"}
    assert {f"{name} causal" for name in MIXERS if MIXERS[name].facts.causal} <= set(found["forward"])
    monkeypatch.setenv("TOKENMIX_BACKEND", "gpu9")
    assert cli.main(["doctor"]) == 1
    assert "Unset it" in capsys.readouterr().out


def test_doctor_finds_a_broken_mixer(capsys, monkeypatch):
    monkeypatch.setattr("tokenmix.lab.cli.doctor.try_extras", lambda: ({}, ""))

    def broken(self, *args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(MIXERS["aft_simple"], "mix", broken)
    assert cli.main(["doctor"]) == 1
    assert "BROKEN   aft_simple causal: RuntimeError: no such kernel; reinstall" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "there is no verb 'trian'; nearest: train"),
        (["compare", "a", "b"], "`compare` is `report` here: tokenmix report RUN"),
        (["train", "txt", "--out", "OUT"], "there is no recipe 'txt'; nearest: text"),
        (["train", "images", "--out", "OUT"], "pvt_imagenet; `tokenmix list` says what each is for"),
        (["train", "text", "--row", "aft_locl", "--out", "OUT"], "nearest: aft_local"),
        (["train", "text", "--size", "big", "--out", "OUT"], "size"),
        (["train", "text", "--out", "OUT", "--rwo", "x"], "--rwo"),
        (["train", "text", "--out", "OUT", "--model.dmi", "3"], "no field 'model.dmi'; nearest: model.dim"),
        (["train", "text", "--out", "OUT", "--model.dim"], "--model.dim needs a value"),
        (["train", "text", "--out", "OUT", "--model.dim", "x"], "model.dim must be an int, got 'x'"),
        (
            ["train", "text", "--out", "OUT", "--model.mixers", '[{"name": "aft_loca", "window": 3}]'],
            "nearest: aft_local",
        ),
        (["train", "text", "--out", "OUT", "--model.mixers", '[{"name": "aft_local", "windw": 3}]'], "nearest: window"),
        (["train", "text", "--out", "OUT", "--model.mixers", '[{"name": "aft_local", "window": -1}]'], "window"),
        (
            ["train", "text", "--out", "OUT", "--model.mixers", '[{"name": "aft_local", "window": 3, "rank": 0}]'],
            "rank",
        ),
        (["train", "text", "--out", "OUT", "--data", "/nothing/here"], "/nothing/here"),
        (["train", "aft_enwik8", "--out", "OUT", "--data", "TEXT"], "is not enwik8"),
        (
            ["train", "text", "--out", "OUT", "--data", "TEXT", "--model.max_len", "9000", "--data.seq_len", "9000"],
            "too short",
        ),
        (["train", "text", "--out", "RUN"], "holds a run already"),
        (["train", "text", "--out", "TEXT"], "is a file"),
        (["train", "text", "--out", "TEXT/run"], "could not be created"),
        (["train", "text", "--out", "OUT", "--lr", "3e-4"], "no option --lr; did you mean --optim.lr?"),
        (["train", "text", "--out", "OUT", "--window=8"], "did you mean --model.mixers.0.window?"),
        (["sweep", "text", "--out", "OUT", "--batch-size", "8"], "did you mean --train.batch_size?"),
        (["resume", "RUN", "--save-every", "8"], "did you mean --train.save_every?"),
        (
            ["train", "text", "--out", "OUT", "--learning-rate", "1"],
            "no option --learning-rate; did you mean --optim.lr?",
        ),
        (
            ["train", "text", "--out", "OUT", "--mixer", "hydra"],
            "a mixer is a row, --row NAME, or a spec, --model.mixers",
        ),
        (["sweep", "text", "--out", "OUT", "--mixer", "hydra"], "a mixer is a row, --rows NAME, or a spec"),
        (
            ["sweep", "text", "--out", "OUT", "--steps", "2"],
            "rows is empty; give at least one, such as --rows attention",
        ),
        (["train", "text", "--out", "OUT", "--max-steps=9"], "did you mean --train.steps?"),
        (["train", "text", "--out", "OUT", "--optim.learning_rate", "1"], "did you mean optim.lr?"),
        (["train", "text", "--out", "OUT", "--optim.name", "lion"], "tokenmix.lab.train(config, out, optimizer=...)"),
        (
            ["train", "text", "--out", "OUT", "--model.mixers", "[{name: aft_local}]"],
            """write it like --model.mixers '[{"name": "aft_local", "window": 32}]'""",
        ),
        (
            ["train", "text", "--out", "OUT", "--model.mixers", "aft_local"],
            "aft_local needs the option 'window'",
        ),
        (
            ["train", "text", "--out", "OUT", "--model.mixers.0", "{name: aft_local}"],
            """write it like --model.mixers.0 '{"name": "aft_local", "window": 32}'""",
        ),
        (
            ["train", "text", "--out", "OUT", "--optim.betas", "[0.9; 0.98]"],
            "write it like --optim.betas '[0.9, 0.98]'",
        ),
        (["train", "text", "--out", "OUT", "--model.mixers.1.window", "8"], "model.mixers has only model.mixers.0"),
        (["train", "text", "--out", "OUT", "--model.mixers.0.windw", "8"], "no option 'windw'; nearest: window"),
        (["train", "text", "--out", "OUT", "--model.mixers.0.name", "nowhere:Mine"], "'nowhere' of the mixer"),
        (["train", "text", "--out", "OUT", "--model.mixers.0.name", "own_mixer:Min"], "it has WeighedMean"),
        (["train", "text", "--out", "OUT", "--model.mixers.0.name", "json:Mine"], "it has none"),
        (["train", "texd", "--help"], "there is no recipe 'texd'; nearest: text"),
        (["train", "text", "--row", "aft_locl", "--help"], "nearest: aft_local"),
        (["resume", "OUT"], "not a run directory"),
        (["resume", "RUN", "--from", "3"], "no checkpoint of step 3"),
        (["resume", "RUN", "--train.steps", "1"], "error: resume: train.steps=1 is less than the"),
        (["resume", "RUN", "--model.dim", "3"], "model.dim cannot change"),
        (["eval", "RUN", "--split", "tset"], "there is no split 'tset'"),
        (["eval", "RUN", "--stride", "33"], "stride must be in 1..seq_len=32"),
        (["eval", "RUN", "--seq-len", "64"], "max_len=32"),
        (["sample", "RUN", "--bytes", "40"], "n can be at most 31"),
        (["sample", "RUN", "--prompt", ""], "the prompt is empty"),
        (["sample", "RUN", "--temperature", "-1"], "temperature"),
        (["sample", "RUN", "--beams", "1"], "--beams is for encoder-decoders; "),
        (["check", "attention", "--options", "{heads: 2}"], "not JSON"),
        (["check", "attention", "--options", "[2]"], "must be a JSON object"),
        (["check", "atention"], "nearest: attention"),
        (["check", "attention", "--options", '{"heds": 2}'], "has no option 'heds'; nearest: heads"),
        (["check", "aft_local"], "needs the options max_len, window"),
        (["check", "set", "--options", '{"grid": 4}'], "grid is a list of positive sizes"),
        (["check", "set", "--options", '{"grid": [4, 2]}'], "takes no grid"),
        (
            ["check", "pooling", "--options", '{"ndim": 2, "causal": false}'],
            'Give one in --options, such as "grid": [4, 5]',
        ),
        (["check", "set", "--options", '{"grid": [4], "prefix": "x"}'], "prefix is the number of tokens"),
        (["check", "attention", "--options", '{"heads": 3}'], "heads=3 must divide dim=16"),
        (["report", "OUT"], "not a run directory"),
        (["report", "RUN", "--once", "--x", "step"], "--x, --once is for --watch, which was not given"),
        (["report", "RUN", "--watch", "--csv", "OUT"], "--csv and --watch exclude each other"),
        (["export", "RUN", "OUT", "--decode", "--chunk", "2"], "--decode, --chunk is for ONNX, and "),
        (["export", "RUN", "OUT", "--operators", "standard"], "--operators is for ONNX, and "),
        (["export", "RUN", "m.onnx", "--format", "hf", "--fixed"], "m.onnx becomes a Hugging Face folder"),
        (["export", "RUN", "OUT", "--format", "onnx", "--step", "best"], "--step is for Hugging Face folders"),
        (["look", "RUN"], "Available subcommands: sentence, tokens, images; see `tokenmix look --help`"),
        (["look", "tokens"], "look tokens: Missing from tokenmix look tokens: MODEL"),
        (["look", "images", "RUN", "a.png"], "--out PATH Folder to write the pictures to; see `tokenmix look images"),
        (["look", "sentence", "RUN", "--txt", "a"], "look sentence: there is no option --txt; nearest: --text"),
        (["look", "sentence", "RUN", "--data", "TEXT"], "no option --data; it shows one sentence, which --text gives"),
        (["look", "tokens", "RUN", "--data", "digits"], "stands here after the model: look tokens RUN digits"),
        (["export-hf", "RUN", "OUT"], "error: `export-hf` is `export` here: tokenmix export RUN OUT."),
        (["explain", "RUN"], "`explain` is `look sentence` here: tokenmix look sentence RUN --text TEXT."),
    ],
)
def test_what_does_not_work_is_one_line_and_exit_2(argv, words, capsys, tmp_path, text, run):
    places = {"OUT": str(tmp_path / "out"), "RUN": run, "TEXT": text, "TEXT/run": f"{text}/run"}
    assert words in refused(capsys, *(places.get(a, a) for a in argv))
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_one_line(run, capsys, tmp_path):
    import shutil

    copy = shutil.copytree(run, tmp_path / "run")
    last = sorted((copy / "checkpoints").iterdir())[-1]
    (last / "model.safetensors").write_bytes(b"short")
    for verb in ("resume", "eval", "sample"):
        assert "model.safetensors is truncated" in refused(capsys, verb, str(copy))


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(MixerError, match="no recipe"):
        cli.main(["train", "txt", "--out", str(tmp_path), "--debug"])


def test_ctrl_c_says_how_to_go_on(capsys, monkeypatch, run):
    from tokenmix.lab import train

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "resume", interrupted)
    assert cli.main(["resume", run]) == 130
    assert "tokenmix resume" in capsys.readouterr().err


def test_a_signal_ends_a_command_with_its_code_and_the_real_path(text, tmp_path):
    """The signal is sent from inside a step, so that no clock decides where it lands."""
    code = """
import os, signal, sys
from tokenmix.lab.cli import main
from tokenmix.lab.train.loop import Trainer

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs start without

def step(self, real=Trainer.step):
    real(self)
    if self.progress.step == 1:
        os.kill(os.getpid(), int(sys.argv[1]))

Trainer.step = step
sys.exit(main(sys.argv[2:]))
"""
    for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")):
        out = str(tmp_path / name)
        argv = ["train", "text", "--data", text, "--out", out, *TINY, *SPEED]
        ended = subprocess.run([sys.executable, "-c", code, str(int(number)), *argv], capture_output=True, text=True)
        assert ended.returncode == 128 + number
        last = ended.stderr.splitlines()[-1]
        said = f"{out}: stopped by {name} after step 1, which is saved; `tokenmix resume {out}` continues it."
        assert last == said
        assert "Traceback" not in ended.stderr
        assert cli.main(["resume", out]) == 0


def test_check_and_report_are_handed_on(monkeypatch, run, tmp_path, capsys):
    from tokenmix.lab import report
    from tokenmix.testing import cli as suite

    asked = []
    monkeypatch.setattr(suite, "main_check", lambda *args: asked.append(args) or 1)
    assert cli.main(["check", "mine:Mixer", "--options", '{"window": 8}', "--json"]) == 1
    assert asked == [("mine:Mixer", {"window": 8}, True, None, False, "cpu")]
    assert cli.main(["check", "mine.py:Mixer", "--reference", "mine.py:equation", "--verbose"]) == 1
    assert asked.pop() == ("mine.py:Mixer", {}, False, "mine.py:equation", True, "cpu")
    monkeypatch.setattr(
        report, "write_report", lambda dirs, out, **more: (asked.append(([str(d) for d in dirs], out)), out)[1]
    )
    assert cli.main(["report", run, run, "--out", str(tmp_path / "page.html")]) == 0
    assert asked[1] == ([run, run], tmp_path / "page.html")
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")


def test_a_disk_that_refuses_is_one_line_and_the_run_goes_on_later(text, tmp_path):
    """The system refuses: no file of this process may grow beyond 60 kB, and the optimiser's state is larger."""
    out = str(tmp_path / "run")
    argv = [sys.executable, "-m", "tokenmix", "train", "text", "--data", text, "--out", out, *TINY, *SPEED]
    ended = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert ended.returncode == 2
    assert (
        "the checkpoint of step 2 could not be written (File too large); there is no earlier checkpoint" in ended.stderr
    )
    begun = [line.partition(":")[0] for line in ended.stderr.splitlines()]
    assert begun == ["recipe", "data", "warning", "error"]  # what the size does, what was read, idle settings, the end
    assert os.listdir(os.path.join(out, "checkpoints")) == []
    assert cli.main(["resume", out]) == 0


def test_importing_the_library_needs_torch_only():
    block = "import sys\nclass No:\n    def find_spec(self, name, *rest):\n"
    block += "        if name.split('.')[0] in BLOCKED: raise ModuleNotFoundError(name)\n"
    names = {"numpy", "tyro", "rich", "safetensors", "yaml", "matplotlib", "jinja2"}
    code = f"BLOCKED = {names!r}\n{block}sys.meta_path.insert(0, No())\n"
    code += "import tokenmix.models, tokenmix.lab.data, tokenmix.lab.train, tokenmix.lab.recipes, tokenmix.lab.cli\n"
    code += "assert 'torch._dynamo' not in sys.modules, 'the compiler takes longer to import than all of tokenmix'\n"
    code += "sys.exit(tokenmix.lab.cli.main(['list']))"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert (
        ended.stderr.strip().splitlines()[-1]
        == "error: the command line needs the extra 'train': pip install 'tokenmix[train]'."
    )


def test_help_and_version_of_the_package(capsys):
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert cli.main(["train", "--help"]) == 0
    assert "--row" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmix {tokenmix.__version__}\n"
    assert isinstance(cli, types.ModuleType)


def test_the_help_of_a_recipe_lists_its_rows_and_the_fields_with_their_values(capsys):
    assert cli.main(["train", "text", "--row", "hybrid", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--out {None}|PATH" in said
    assert "rows of text, of which aft_local is the default" in said
    assert "  --row hydra: Hydra attention, cosine kernel" in said
    assert "fields of the config, with their values in row hybrid at size smoke" in said
    assert "  --optim.lr 0.003: highest learning rate of AdamW or SGD, above 0." in said
    assert "  --model.mixers.3.name attention" in said
    assert "  --train.max_seconds none: seconds of training time" in said
    assert "  --data.seq_len 256: " in said
    assert max(len(line) for line in said.splitlines()) <= 120
    assert cli.main(["train", "aft_cifar10_classify", "--size=paper", "--help"]) == 0
    assert "  --data.augment.flip " in capsys.readouterr().out
    assert cli.main(["train", "--help"]) == 0
    assert "`tokenmix train RECIPE --help` shows the rows of a recipe" in capsys.readouterr().out


def test_paths_into_lists_keep_the_rest_of_the_spec(text, tmp_path, capsys):
    out = tmp_path / "run"
    argv = ["train", "text", "--row", "aft_local", "--data", text, "--out", str(out), *TINY[2:], *SPEED]
    assert cli.main([*argv, "--model.mixers.0.window", "40", "--optim.betas.1", "0.98"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["model"]["mixers"] == [{"name": "aft_local", "window": 40, "rank": 32}]
    assert config["optim"]["betas"] == [0.9, 0.98]
    warned = "warning: aft_local: window=40 is larger than max_len=32, so all tokens lie inside of it."
    others = ("recipe: ", "data: ", "warning: settings without effect: ")
    assert [line for line in capsys.readouterr().err.splitlines() if not line.startswith(others)] == [warned]


def test_a_mixer_of_a_module_of_ones_own_trains_and_is_scored(text, tmp_path, capsys, monkeypatch):
    """The module lies in the working folder, which `tokenmix` has to look in by itself."""
    name = "mine_of_test_cli:Mine"
    (tmp_path / "mine_of_test_cli.py").write_text(
        "from own_mixer import WeighedMean\n\n\nclass Mine(WeighedMean):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = json.dumps([{"name": name, "floor": 0.25}])
    try:
        assert cli.main(["train", "text", "--data", text, "--out", "run", "--model.mixers", spec, *TINY, *SPEED]) == 0
        assert MIXERS[name].__name__ == "Mine"
        assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["mixers"] == json.loads(spec)
        assert cli.main(["eval", "run"]) == 0
        del MIXERS[name], sys.modules["mine_of_test_cli"]
        capsys.readouterr()
        assert cli.main(["eval", "run"]) == 2  # the run may be somebody else's
        assert "set TOKENMIX_MODULES=mine_of_test_cli if you trust it" in capsys.readouterr().err
        assert "mine_of_test_cli" not in sys.modules
        monkeypatch.setenv("TOKENMIX_MODULES", "mine_of_test_cli")
        assert cli.main(["eval", "run"]) == 0
    finally:
        MIXERS.pop(name, None)
        sys.modules.pop("mine_of_test_cli", None)


def test_other_verbs_name_commands_that_parse():
    for usage in OTHER_VERBS.values():
        tyro.extras.subcommand_cli_from_dict(VERBS, args=usage.split() + ["KEY"] * (usage == "paper"))


@pytest.mark.parametrize("name", [*VERBS, *LOOKS])
def test_every_option_of_a_verb_has_its_help(name):
    verb = (VERBS | LOOKS)[name]
    assert dataclasses.is_dataclass(verb)
    assert verb.__dataclass_params__.frozen
    body = ast.parse(textwrap.dedent(inspect.getsource(verb))).body[0].body
    after = {node.target.id: follower for node, follower in itertools.pairwise(body) if isinstance(node, ast.AnnAssign)}
    assert set(after) == {field.name for field in dataclasses.fields(verb)}
    assert all(
        isinstance(getattr(node, "value", None), ast.Constant) and isinstance(node.value.value, str)
        for node in after.values()
    )


def test_the_verbs_import_nothing_heavy():
    """`tokenmix --help` and `tokenmix list` do not wait for what only other verbs need."""
    rooms = ("advise", "bench", "data", "hosts", "models", "recipes", "report", "testing", "train")
    code = "import sys, tokenmix\nbefore = set(sys.modules)\nimport tokenmix.lab.cli.verbs\n"
    code += f"sys.exit(str({ ({f'tokenmix.{room}' for room in rooms}) } & set(sys.modules) - before or ''))"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert ended.stderr.strip() == ""


def test_the_package_runs_as_a_module():
    ended = subprocess.run([sys.executable, "-m", "tokenmix", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0
    assert "doctor" in ended.stdout


def test_pictures_of_a_text_run_are_refused_in_one_line(run, tmp_path, capsys):
    assert "look images: pictures of images need a ViT, got LM" in refused(
        capsys, "look", "images", run, str(tmp_path / "a.png"), "--out", str(tmp_path / "drawn")
    )


def test_a_sample_can_be_printed_in_any_encoding(run, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["sample", run, "--prompt", "é\udcff", "--seed", "1"]) == 0
    assert out.buffer.getvalue().startswith(b"\\xe9\\ufffd")


def test_numbers_out_of_range_are_one_line(run, text, tmp_path, capsys):
    big = str(1 << 70)
    for argv in (
        ["train", "text", "--data", text, "--out", str(tmp_path / "new"), "--train.seed", big],
        ["sample", run, "--seed", big],
    ):
        assert f"seed={big} is out of range" in refused(capsys, *argv)


def test_a_page_that_cannot_be_written_leaves_the_old_one(run, tmp_path, monkeypatch, capsys):
    page, real = tmp_path / "r.html", os.fsync
    page.write_text("the old one")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(output, "REPEAT", 1e9)  # no line of progress beside the error, on a slow machine either
    assert refused(capsys, "report", run, "--out", str(page)) == f"error: {page}: No space left on device\n"
    monkeypatch.setattr(os, "fsync", real)
    assert page.read_text() == "the old one"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_a_report_says_what_it_is_doing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(output, "REPEAT", 0.0)
    assert cli.main(["report", run, "--out", str(tmp_path / "r.html")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'r.html'}\n"
    assert "report: run (1 of 1): effective attention of layer 0\n" in err


def test_a_warning_is_said_once(monkeypatch, capsys):
    """Data that is opened twice, for the sizes of the model and for training, would say twice what it leaves out."""

    def warn_twice(argv, own_process):
        warnings.simplefilter("always")
        warnings.warn("2 of 122 files are left out", stacklevel=1)
        warnings.warn("2 of 122 files are left out", stacklevel=1)
        return 0

    monkeypatch.setattr(entry, "_dispatch", warn_twice)
    assert cli.main(["train"]) == 0
    assert capsys.readouterr().err == "warning: 2 of 122 files are left out\n"
