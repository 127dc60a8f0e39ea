"""Pairs of texts: files and their errors, subwords, batches, training to the bit, evaluation, translation."""

import gzip
import json
import shutil
import warnings

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.cli import main
from tokenmix.lab.data import Subwords, open_parallel
from tokenmix.lab.data.docstrings import docstring_pairs
from tokenmix.lab.data.grammar import sentence_pairs
from tokenmix.lab.data.pair_sampler import IGNORED, LengthBuckets, pair_batch
from tokenmix.lab.data.subwords import END, PAD, SPECIAL, START
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import write_report
from tokenmix.lab.train import evaluate_run, load_run, resume, train, translate_run
from tokenmix.lab.train.pair_task import PairTask, measure_texts
from tokenmix.lab.train.rundir import RunDir

LINES = {"en": ["a cat", "a dog runs", "the house"], "de": ["eine Katze", "ein Hund läuft", "das Haus"]}


def write(path, lines):
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def folder(tmp_path):
    for start in ("train", "val", "test_2016"):
        for language, lines in LINES.items():
            write(tmp_path / f"{start}.{language}.gz", lines)
    return tmp_path


def small(**changes):
    fields = {"train.steps": 6, "train.eval_every": 3, "train.save_every": 2, "train.eval_texts": 8, "model.dim": 16}
    return RECIPES["grammar"].config("attention").override({**fields, "model.layers": 1, **changes})


# --- files ---


def test_a_folder_has_three_splits_and_two_languages(folder):
    text = open_parallel(str(folder), languages=("de", "en"))
    assert text.split("train")[1] == ("ein Hund läuft", "a dog runs")
    assert {name: len(pairs) for name, pairs in text.splits.items()} == {"train": 3, "valid": 3, "test": 3}
    assert open_parallel(str(folder)).split("test")[0] == ("eine Katze", "a cat")  # by name, where there are but two


def test_two_files_a_table_and_lines_of_json_hold_the_same_pairs(tmp_path):
    pairs = [(f"source {i}", f"target {i}") for i in range(200)]
    a, b = write(tmp_path / "a.txt", [p[0] for p in pairs]), write(tmp_path / "b.txt", [p[1] for p in pairs])
    table = write(tmp_path / "t.tsv", ["\t".join(p) for p in pairs])
    header = write(tmp_path / "h.tsv", ["n\tde\ten", *(f"{i}\t{p[1]}\t{p[0]}" for i, p in enumerate(pairs))])
    records = write(tmp_path / "r.jsonl", [json.dumps({"source": a, "target": b}) for a, b in pairs])
    found = [
        open_parallel(str(a), target=str(b)),
        open_parallel(str(table)),
        open_parallel(str(header), languages=("en", "de")),
        open_parallel(str(records)),
    ]
    assert all(text.splits == found[0].splits for text in found)
    assert sorted(p for split in found[0].splits.values() for p in split) == sorted(pairs)
    assert len({text.sha256 for text in found}) == 1


def test_functions_give_their_docstrings(tmp_path):
    (tmp_path / "a.py").write_text(
        'def f(x):\n    """Add\n    one.\n\n    More."""\n    # why\n    return x + 1\n\ndef g():\n    return 2\n'
        'class A:\n    async def h(self, *, y=3):\n        """Say y."""\n        return y\n'
        'def f(x):\n    """Again."""\n    return x + 1\n'
    )
    (tmp_path / "b.py").write_text("def (")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c.py").write_text('def t():\n    """Test."""\n    return 1\n')
    assert docstring_pairs(tmp_path) == [("f(x): return x + 1", "Add one."), ("h(self, *, y=3): return y", "Say y.")]


def test_pairs_of_one_source_are_in_one_split():
    sources = [source for source, _ in sentence_pairs()]
    assert len(set(sources)) == len(sources) > 1000
    text = open_parallel("grammar")
    parts = [{source for source, _ in text.split(name)} for name in ("train", "valid", "test")]
    assert len(parts[0] | parts[1] | parts[2]) == sum(len(part) for part in parts)
    assert {"The ball is blue", "You are welcome", "The black cat drank the milk"} <= parts[0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: write(f / "train.de.gz", LINES["de"][:2]), "must have as many lines, got"),
        (lambda f: write(f / "train.en.gz", ["a", "", "b"]), "line 2 of"),
        (lambda f: (f / "train.en.gz").write_bytes(gzip.compress("a\nb\nö".encode("latin1"))), "is not UTF-8: byte 4"),
        (lambda f: (f / "val.de.gz").unlink(), "has no valid or validation or val or dev file that ends in .de"),
        (lambda f: (f / "val.de.gz").write_bytes(b"\x1f\x8bnonsense"), "cannot be read"),
        (lambda f: (f / "test_2016.en.gz").write_bytes(gzip.compress(b"")), "is empty"),
        (lambda f: write(f / "train.fr.gz", LINES["de"]), "has files for de, en, fr; say which"),
    ],
)
def test_bad_files_are_one_clear_line(folder, spoil, words):
    spoil(folder)
    with pytest.raises(MixerError) as caught:
        open_parallel(str(folder))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("a.tsv", ["a\tb", "alone"], "line 2 of"),
        ("a.tsv", ["a\tb", "a\t "], "none of them empty"),
        ("a.jsonl", ['{"source": "a"}'], "line 1 of"),
        ("a.jsonl", ["nonsense"], "an object with source and target"),
        ("a.txt", ["a"], "give the other side too"),
        ("a.tsv", ["a\tb"], "which leave none for"),
    ],
)
def test_bad_tables_are_one_clear_line(tmp_path, name, lines, words):
    with pytest.raises(MixerError, match=words):
        open_parallel(str(write(tmp_path / name, lines)))


def test_a_path_says_where_a_named_set_lies(folder):
    config = small(**{"data.source": "multi30k", "data.path": str(folder), "model.vocab": 300})
    assert PairTask(config).text.split("train")[0] == ("eine Katze", "a cat")


def test_a_missing_source_names_what_there_is():
    with pytest.raises(MixerError, match="one of grammar, docstrings"):
        open_parallel("grammer")


# --- subwords ---


def test_any_text_comes_back_from_subwords(tmp_path):
    made = Subwords.train(["the cat", "the dog"] * 3, 300)
    for text in ("the cat", "Ünïcode 漢字 🙂", "a  b", "<s> is text"):
        assert made.decode([START, *made.encode(text), END]) == text or text == "<s> is text"
    assert made.encode("the") != made.encode("dog")
    assert made.encode_all(["the cat", "x"]) == [made.encode("the cat"), made.encode("x")]
    assert made.pieces([START, *made.encode("the cat"), END]) == ["<s>", "the", "cat", "</s>"]
    (tmp_path / "t.json").write_text(made.json)
    assert Subwords.load(tmp_path / "t.json").sha256 == made.sha256


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(MixerError, match="need model.vocab >= 260, got 259"):
        Subwords.train(["a"], 259)
    with pytest.raises(MixerError, match="is not a tokenizer"):
        Subwords("{}")
    with pytest.raises(MixerError, match="cannot be read"):
        Subwords.load(tmp_path / "none.json")
    other = json.loads(Subwords.train(["a"], 300).json)
    other["added_tokens"] = []
    other["model"]["vocab"] = {k: (v + 1) % 260 for k, v in other["model"]["vocab"].items()}
    with pytest.raises(MixerError, match="the tokens 0 to 3 must be <pad>, <s>, </s>, <mask>"):
        Subwords(json.dumps(other))
    assert SPECIAL[PAD] == "<pad>"


# --- batches ---


@pytest.mark.parametrize(("size", "tokens"), [(7, None), (64, 40), (1, None)])
def test_every_epoch_visits_each_row_once_within_the_limits(size, tokens):
    lengths = torch.randint(1, 6, (113, 2), generator=torch.Generator().manual_seed(0))
    buckets = LengthBuckets(lengths, batch_size=size, batch_tokens=tokens, seed=3)
    epochs = []
    for epoch in range(3):
        batches = [buckets.rows(epoch * len(buckets) + i) for i in range(len(buckets))]
        assert sorted(row for batch in batches for row in batch) == list(range(113))
        for batch in batches:
            assert 1 <= len(batch) <= size
            assert tokens is None or len(batch) * int(lengths[batch].amax(0).sum()) <= tokens
        epochs.append(batches)
    assert epochs[0] != epochs[1] != epochs[2]
    together = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert size == 1 or together[0] != together[1] != together[2]  # not the same rows in each batch either
    fresh = LengthBuckets(lengths, batch_size=size, batch_tokens=tokens, seed=3)
    assert fresh.rows(2 * len(buckets) + 1) == epochs[2][1]  # a function of the step alone
    assert LengthBuckets(lengths, batch_size=size, batch_tokens=tokens, seed=4).rows(0) != epochs[0][0] or size == 1


def test_rows_of_a_batch_have_like_lengths():
    lengths = torch.randint(1, 60, (4000, 1), generator=torch.Generator().manual_seed(0))
    lengths = torch.cat([lengths, lengths + torch.arange(4000)[:, None] % 4], 1)
    buckets = LengthBuckets(lengths, batch_size=32)
    padded = sum(len(rows) * int(lengths[rows].amax(0).sum()) for rows in map(buckets.rows, range(len(buckets))))
    assert padded < 1.05 * int(lengths.sum())


def test_a_row_that_never_fits_is_refused():
    with pytest.raises(MixerError, match="data.batch_tokens=10 is less than the 12 tokens of one row"):
        LengthBuckets(torch.tensor([[2, 3], [6, 6]]), batch_size=4, batch_tokens=10)


def test_a_batch_begins_targets_and_ends_both():
    batch, said = pair_batch([[5, 6], [7]], [[8], [9, 10, 11]])
    assert batch.source.tolist() == [[5, 6, END], [7, END, PAD]]
    assert batch.target.tolist() == [[START, 8, PAD, PAD], [START, 9, 10, 11]]
    assert said.tolist() == [[8, END, IGNORED, IGNORED], [9, 10, 11, END]]
    assert batch.source_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.target_mask.sum(1).tolist() == [2, 4]


# --- the task ---


def test_the_loss_is_the_mean_over_real_targets_and_parts_weigh_by_them():
    task = PairTask(small())
    inputs, targets = task.batch(0)
    model = load_fresh(task)
    with torch.no_grad():
        logs = model(*inputs).log_softmax(-1)
        real = targets != IGNORED
        mean = -logs[real].gather(1, targets[real][:, None]).mean()
        torch.testing.assert_close(task.loss(model(*inputs), targets), mean)
        parts = [(tuple(t[i::2] for t in inputs), targets[i::2]) for i in (0, 1)]
        total = sum(task.loss(model(*x), y) * task.count_targets(y) for x, y in parts) / task.count_targets(targets)
        torch.testing.assert_close(total, mean)


def load_fresh(task):
    from tokenmix.models import build_model

    torch.manual_seed(0)
    return build_model(task.model).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "run"
    train(small(), path, verbose=False)
    return path


def test_a_run_keeps_its_tokenizer_and_writes_samples(run):
    assert Subwords.load(run / "tokenizer.json").vocab <= 512
    env = json.loads((run / "env.json").read_text())
    assert env["texts"]["left_out"] == 0
    assert env["texts"]["tokenizer"] == Subwords.load(run / "tokenizer.json").sha256
    assert (run / "samples" / "step_00000006.txt").read_text().startswith("source  ")


def test_a_resumed_run_has_the_weights_of_one_that_never_stopped(run, tmp_path):
    train(small(**{"train.steps": 6}), tmp_path / "a", verbose=False)
    resume(tmp_path / "a", from_step=4)
    resumed = load_run(tmp_path / "a")[0].state_dict()
    for name, weight in load_run(run)[0].state_dict().items():
        assert torch.equal(weight, resumed[name]), name


def test_accumulation_gives_the_same_step(tmp_path):
    found = []
    for parts in (1, 4):
        changes = {"train.steps": 1, "train.accumulate": parts, "optim.name": "adamw"}
        changes["train.batch_size"] = 2048  # so that the rows have many lengths
        train(small(**changes), tmp_path / str(parts), verbose=False)
        found.append(load_run(tmp_path / str(parts))[0].state_dict())
    for name, a in found[0].items():
        torch.testing.assert_close(a, found[1][name], rtol=0, atol=1e-5, msg=name)


def test_a_changed_tokenizer_or_corpus_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").write_text(Subwords.train(["a b"], 300).json)
    with pytest.raises(MixerError, match="tokenizer.json changed since the run began"):
        evaluate_run(tmp_path / "run", record=False)
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(MixerError, match="cannot be read"):
        resume(tmp_path / "run")


def test_eval_scores_what_the_model_writes(run, tmp_path, capsys):
    assert main(["eval", str(run), "--max-texts", "6", "--written", str(tmp_path / "w.txt"), "--beams", "2"]) == 0
    said = capsys.readouterr().out
    assert "BLEU" in said
    assert "with 2 beams (nrefs:1|" in said
    written = (tmp_path / "w.txt").read_text().splitlines()
    assert len(written) == 6
    model, config = load_run(run)
    task = PairTask(config, run)
    alone = [task.write(model, [tokens], beams=2)[0] for tokens in task.tokens_of("test")[0][:6]]
    assert written == alone  # a batch of many lengths writes what its rows write alone


def test_a_report_shows_the_scores_of_pairs(run, tmp_path):
    evaluate_run(run, split="valid", max_texts=4, beams=1)
    lines = RunDir.open(run).read_metrics()
    assert lines[-1]["signature"].startswith("nrefs:1|")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = write_report([run], tmp_path / "report.html").read_text()
    assert "valid cross-entropy" in page
    assert "top-1" not in page


def test_sample_translates(run, capsys):
    assert main(["sample", str(run), "--prompt", "The ball is blue"]) == 0
    assert capsys.readouterr().out.strip() == translate_run(run, "The ball is blue")


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("data.source is not set", {"data.source": None}),
        ("data.max_tokens must be in 2..model.max_len=24, got 25", {"data.max_tokens": 25}),
        ("no pair of grammar has at most 2 tokens", {"data.max_tokens": 2}),
        ("data.smoothing must be in", {"data.smoothing": 1.0}),
        ("data.metrics has no 'meteor'", {"data.metrics": ["meteor"]}),
        ("model.start and model.end must be these", {"model.end": 3}),
        ("need model.vocab >= 260, got 100", {"model.vocab": 100}),
        ("trained on data of kind 'pairs'", {"data": {"kind": "text"}}),
        ("data.batch_tokens=20 is less than", {"data.batch_tokens": 20}),
        ("data.languages must be two names", {"data.languages": ["en"]}),
    ],
)
def test_bad_configs_are_one_clear_line(words, changes, tmp_path):
    with pytest.raises(MixerError) as caught:
        train(small(**changes), tmp_path / "run", verbose=False)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_bad_prompts_are_one_clear_line(run):
    for prompt in ("", "  ", "word " * 40):
        with pytest.raises(MixerError, match="the source must have 1 to 23 subwords"):
            translate_run(run, prompt)


def test_metrics_are_those_of_the_libraries():
    found = measure_texts(("bleu", "chrf", "rouge"), ["the cat sat on the mat"], ["the cat sat on the mat"])
    assert found["bleu"] == pytest.approx(100)
    assert found["chrf"] == pytest.approx(100)
    assert found["rouge_l"] == pytest.approx(100)
    assert "tok:13a" in found["signature"]
