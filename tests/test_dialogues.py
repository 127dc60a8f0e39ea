"""Dialogues in the form of PersonaChat, and summaries from tables: files, splits, what fits, training, errors."""

import gzip
import json
import random

import pytest

from tokenmix import MixerError
from tokenmix.lab.cli import main
from tokenmix.lab.data import Subwords, open_parallel
from tokenmix.lab.data.dialogues import fit_parts, is_dialogues, read_dialogues
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import evaluate_run, train, translate_run
from tokenmix.lab.train.pair_task import PairTask

TWO = [
    "1 your persona: i have two cats .",
    "2 your persona: i bake bread .",
    "3 partner's persona: i ride .",
    "4 hi , how are you ?\tfine , my cats sleep .\t\ti am sad .|fine , my cats sleep .",
    "5 how many ?\ttwo .\t\tnine .|two .",
    "1 hello\tgood day\t\tbad day|good day",
]
SENTENCES = ["your persona: i have two cats .", "your persona: i bake bread .", "partner's persona: i ride ."]
FIRST = " ".join([*SENTENCES, "them: hi , how are you ?"])


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def many(path, dialogues=120, turns=3, first=0):
    """Write a file of short dialogues, of which no two are alike."""
    lines = []
    for i in range(first, first + dialogues):
        lines.append(f"1 your persona: i own {i} cats .")
        lines += [f"{n + 2} question {n} of {i} ?\treply {n} is {i} .\t\tno .|yes ." for n in range(turns)]
    return write(path, lines)


def small(name="dialogue", **changes):
    fields = {"train.steps": 3, "train.eval_every": 3, "train.save_every": 3, "train.eval_texts": 8, "model.dim": 16}
    sizes = {"model.layers": 1, "model.vocab": 400, "train.batch_size": 8}
    return RECIPES[name].config("synthesizer_dense").override({**fields, **sizes, **changes})


# --- the file ---


def test_a_reply_answers_the_personas_and_all_turns_before_it(tmp_path):
    first, second = read_dialogues(write(tmp_path / "a.txt", TWO))
    assert first.pairs == [
        (FIRST, "fine , my cats sleep ."),
        (f"{FIRST} you: fine , my cats sleep . them: how many ?", "two ."),
    ]
    assert second.pairs == [("them: hello", "good day")]
    assert first.lines[:3] == SENTENCES
    assert first.lines[-1] == "you: two ."


def test_all_pairs_of_a_dialogue_are_in_one_split(tmp_path):
    text = open_parallel(str(many(tmp_path / "a.txt", 200)))
    owners = {name: {source.split("own ")[1].split()[0] for source, _ in pairs} for name, pairs in text.splits.items()}
    assert sum(len(found) for found in owners.values()) == len(set().union(*owners.values())) == 200
    assert all(len(pairs) == 3 * len(owners[name]) for name, pairs in text.splits.items())
    assert min(map(len, owners.values())) > 0
    again = many(tmp_path / "b.txt", 100, first=100)
    again.write_text(again.read_text() + many(tmp_path / "c.txt", 100).read_text())
    for name, pairs in open_parallel(str(again)).splits.items():  # whatever the order of the file
        assert sorted(pairs) == sorted(text.splits[name])


def test_a_folder_may_hold_several_versions_of_its_dialogues(tmp_path):
    for i, split in enumerate(("train", "valid", "test")):
        for version in ("self_original", "self_revised"):
            many(tmp_path / f"{split}_{version}.txt", 2 + i, first=10 * i)
    text = open_parallel(str(tmp_path), version="self_original")
    assert {name: len(pairs) for name, pairs in text.splits.items()} == {"train": 6, "valid": 9, "test": 12}
    with pytest.raises(MixerError, match="several train files: train_self_original.txt, train_self_revised.txt; say"):
        open_parallel(str(tmp_path))
    with pytest.raises(MixerError, match="no train file of version 'none'; there is 'self_original', 'self_revised'"):
        open_parallel(str(tmp_path), version="none")
    (tmp_path / "test_self_original.txt").unlink()
    with pytest.raises(MixerError, match="no test file of version 'self_original'"):
        open_parallel(str(tmp_path), version="self_original")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*TWO[:3], "5 a\tb"], "line 4 of .* has the number 5 after 3"),
        ([*TWO, "hello"], "line 7 of .* must begin with its number"),
        ([*TWO, "2"], "line 7 of .* must begin with its number"),
        ([*TWO, "2 hello"], "line 7 of .* must hold an utterance, a tab and its reply"),
        ([*TWO, "2 hello\t\t\tno|yes"], "line 7 of .* must hold an utterance, a tab and its reply"),
        ([*TWO[:3], TWO[-1]], "the dialogue that begins in line 1 of .* has no utterance"),
        ([*TWO, TWO[0]], "the dialogue that begins in line 7 of .* has no utterance"),
        (TWO, "has 2 dialogues, which leave none for"),
        ([*TWO, "", TWO[0]], "line 7 of .* is empty"),
    ],
)
def test_bad_dialogues_are_one_clear_line(tmp_path, lines, words):
    with pytest.raises(MixerError, match=words) as caught:
        open_parallel(str(write(tmp_path / "a.txt", lines)))
    assert "\n" not in str(caught.value)


# --- what fits ---


@pytest.mark.parametrize(
    ("start", "expected"),
    [(b"1 hi", True), (b"\xef\xbb\xbf1 hi", True), (b"1  hi", False), (b"11 hi", False), (b"", False)],
)
def test_dialogues_are_told_by_their_beginning_alone(tmp_path, start, expected):
    # random bytes, of which gzip makes no less, so that the cut file still begins
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(start + random.Random(0).randbytes(1 << 16))[:-1000])
    assert is_dialogues(tmp_path / "train.txt.gz") == expected
    with pytest.raises(MixerError, match="cannot be read"):
        read_dialogues(tmp_path / "train.txt.gz")


def test_what_fits_is_the_last_turn_the_personas_and_then_the_turns_before_it():
    source = " ".join(
        ["your persona: p", "partner's persona: q", "them: a", "you: b b", "them: c", "you: d", "them: e"]
    )

    def count(part):
        return len(part.split())

    assert fit_parts(source, 100, count) == source
    cut = {
        0: "them: e",
        2: "them: e",
        5: "your persona: p them: e",
        8: "your persona: p partner's persona: q them: e",
        12: "your persona: p partner's persona: q them: c you: d them: e",
        14: "your persona: p partner's persona: q them: c you: d them: e",
        15: "your persona: p partner's persona: q you: b b them: c you: d them: e",
    }
    assert {most: fit_parts(source, most, count) for most in cut} == cut


def test_sources_are_as_long_as_they_may_be(tmp_path):
    path = many(tmp_path / "a.txt", 120, turns=12)
    task = PairTask(small(**{"data.source": str(path), "data.max_tokens": 48}))
    assert len(task.pool.sources) == len(task.text.split("train"))  # none is left out
    counts = [len(tokens) for tokens in task.tokens_of("train")[0]]
    assert max(counts) <= 47 < max(len(task.subwords.encode(source)) for source, _ in task.text.split("train"))
    for (source, _), tokens in zip(task.text.split("train"), task.tokens_of("train")[0], strict=True):
        kept = task.subwords.decode(tokens)
        assert kept.startswith("your persona: ")
        recent = kept.split(" . ", 1)[1]
        assert source.endswith(recent)
        older = source.removesuffix(recent).rstrip().rsplit("you: " if recent.startswith("them") else "them: ", 1)
        if len(older) == 2:  # one more turn would be too much
            assert len(tokens) + len(task.subwords.encode("you: " + older[1])) > 47


# --- training ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talk")
    config = small(**{"data.source": str(many(folder / "talk.txt"))})
    train(config, folder / "run", verbose=False)
    return folder / "run"


def test_a_run_on_dialogues_is_scored_by_all_three_metrics(run):
    env = json.loads((run / "env.json").read_text())
    assert sum(env["texts"]["rows"].values()) == 360
    score = evaluate_run(run, split="valid", beams=1, record=False)
    assert min(score.bleu, score.chrf, score.rouge1, score.rouge_l) >= 0
    assert translate_run(run, "your persona: i own 3 cats . them: hello") == translate_run(
        run, "your persona: i own 3 cats . them: hello"
    )


def test_an_evaluation_leaves_the_training_pairs_alone(run, monkeypatch):
    seen = []
    whole = Subwords.encode_all
    monkeypatch.setattr(Subwords, "encode_all", lambda self, texts: seen.append(len(texts)) or whole(self, texts))
    pairs = json.loads((run / "env.json").read_text())["texts"]["rows"]
    evaluate_run(run, split="valid", beams=0, record=False)
    assert seen == [pairs["valid"]] * 2


# --- tables for each split ---


def articles(folder, ending="jsonl", names=("train", "validation", "test")):
    for i, name in enumerate(names):
        rows = [(f"article {n} of {name} . " * 4, f"summary {n} .\nmore {i} .") for n in range(4)]
        if ending == "tsv":
            lines = ["id\thighlights\tarticle", *(f"7\t{b.splitlines()[0]}\t{a}" for a, b in rows)]
        else:
            lines = [json.dumps({"article": a, "highlights": b, "id": 7}) for a, b in rows]
        write(folder / f"{name}.{ending}", lines)
    return folder


@pytest.mark.parametrize("ending", ["jsonl", "tsv"])
def test_a_folder_may_hold_a_table_for_each_split(tmp_path, ending):
    text = open_parallel(str(articles(tmp_path, ending)), languages=("article", "highlights"))
    assert {name: len(pairs) for name, pairs in text.splits.items()} == {"train": 4, "valid": 4, "test": 4}
    said = "summary 2 .\nmore 1 ." if ending == "jsonl" else "summary 2 ."
    assert text.split("valid")[2] == (("article 2 of validation . " * 4).strip(), said)


def test_tables_of_splits_that_are_missing_or_have_other_columns_are_one_clear_line(tmp_path):
    articles(tmp_path)
    with pytest.raises(MixerError, match="line 1 of .*train.jsonl must hold an object with source and target"):
        open_parallel(str(tmp_path))
    (tmp_path / "validation.jsonl").unlink()
    with pytest.raises(MixerError, match="no valid or validation or val or dev file; it needs train, valid and test"):
        open_parallel(str(tmp_path), languages=("article", "highlights"))


def test_summaries_read_the_beginning_of_long_articles(tmp_path):
    articles(tmp_path)
    changes = {"data.source": str(tmp_path), "data.max_tokens": 16, "model.max_len": 16}
    task = PairTask(small("summaries", **changes))
    assert {len(tokens) for tokens in task.pool.sources} == {15}
    whole = task.subwords.encode(task.text.split("train")[0][0])
    assert whole[:15] in task.pool.sources
    assert task.facts()["texts"]["left_out"] == 0
    with pytest.raises(MixerError, match="no pair of"):
        PairTask(small("summaries", **changes, **{"data.cut_sources": False})).facts()


def test_the_recipes_train_from_the_command_line(tmp_path, capsys):
    fields = {"train.steps": 2, "train.eval_every": 2, "train.save_every": 2, "model.dim": 16, "model.layers": 1}
    options = [part for name, value in {**fields, "model.vocab": 300}.items() for part in (f"--{name}", str(value))]
    folder = articles(tmp_path)
    assert main(["train", "summaries", "--data", str(folder), "--out", str(tmp_path / "run"), *options]) == 0
    assert main(["eval", str(tmp_path / "run"), "--beams", "1", "--max-texts", "2"]) == 0
    assert "ROUGE-L" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["dialogue", "summaries"])
def test_the_printed_size_is_that_of_the_base_transformer(name):
    model = RECIPES[name].config("dense_vanilla", "paper").model
    assert (model.dim, model.layers, model.mixers[0]["heads"], model.max_len) == (512, 6, 8, 512)
