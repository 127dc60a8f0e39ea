"""Documents and labelled texts: files and their errors, masks, spans, packed rows, training to the bit, their verbs."""

import json
import lzma
import shutil

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.cli import main
from tokenmix.lab.data import Subwords, open_documents, open_labelled
from tokenmix.lab.data.masking import corrupt_spans, mask_tokens
from tokenmix.lab.data.packing import PackedRows, pack
from tokenmix.lab.data.pair_sampler import IGNORED
from tokenmix.lab.data.subwords import END, MASK, PAD, SPECIAL, START
from tokenmix.lab.explain.runs import explain_runs
from tokenmix.lab.hub import export_run
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import write_report
from tokenmix.lab.train import classify_run, evaluate_run, fill_run, load_run, match_data, resume, sample_run, train
from tokenmix.lab.train.document_task import chosen_of, packed_rows
from tokenmix.lab.train.label_task import join_texts
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import LM, Encoder, EncoderConfig, LMConfig
from tokenmix.models.looped import LoopConfig
from tokenmix.testing.tolerances import BY_DTYPE

WORDS = ["the", "a", "cat", "dog", "house", "green", "red", "old", "runs", "sleeps", "sees", "and", "under", "over"]


def sentences(n, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (3 + k % 9,), generator=draw)) for k in range(n)]


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "documents"
    found.mkdir()
    for i, line in enumerate(sentences(300)):
        (found / f"{i:03d}.txt").write_text(f"{line}.\n{line[::-1]} {i}\n")
    return found


@pytest.fixture
def labelled(tmp_path):
    for name, seed, n in (("set_train", 1, 400), ("set_dev", 2, 60), ("set_test", 3, 60)):
        rows = [f"{line}\t{int('cat' in line.split())}" for line in sentences(n, seed)]
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    return tmp_path


def small(recipe, source, row="attention", **changes):
    fields = {
        "data.source": str(source),
        "data.max_tokens": 24,
        "model.max_len": 24,
        "model.dim": 16,
        "model.layers": 1,
        "model.vocab": 400,
        "train.steps": 6,
        "train.eval_every": 3,
        "train.save_every": 2,
        "train.batch_size": 4,
    }
    config = RECIPES[recipe].config(row).override(fields)
    return match_data(config).override(changes)


# --- files ---


def test_documents_come_from_folders_files_and_tables(folder, tmp_path_factory):
    texts = sorted(file.read_text().strip() for file in folder.iterdir())
    other = tmp_path_factory.mktemp("tables")
    (other / "all.txt").write_text("\n\n\n".join(texts))
    (other / "a.jsonl").write_text("".join(json.dumps({"n": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    (other / "a.jsonl.xz").write_bytes(lzma.compress((other / "a.jsonl").read_bytes()))
    found = [open_documents(str(path)) for path in (folder, other / "all.txt", other / "a.jsonl", other / "a.jsonl.xz")]
    assert sorted(text for rows in found[0].splits.values() for (text,) in rows) == texts
    for rows in found[1:]:
        assert {name: sorted(part) for name, part in rows.splits.items()} == {
            name: sorted(part) for name, part in found[0].splits.items()
        }
    assert found[2].sha256 == found[3].sha256


def test_a_folder_of_tables_has_its_own_splits(labelled):
    documents = open_documents(str(labelled))
    rows, labels = open_labelled(str(labelled))
    assert {name: len(part) for name, part in documents.splits.items()} == {"train": 400, "valid": 60, "test": 60}
    assert documents.split("valid")[0] == rows.split("valid")[0][:1]
    assert labels == ["0", "1"]


def test_files_of_python_are_documents():
    rows = open_documents("stdlib")
    assert len(rows.split("train")) > 300
    assert any("def " in text for (text,) in rows.split("test"))


def test_docstrings_match_or_not_within_their_split(monkeypatch):
    pairs = [(f"f{i}(x): return {i}", f"Return {i}.") for i in range(2000)]
    monkeypatch.setattr("tokenmix.lab.data.labelled.docstring_pairs", lambda: pairs)
    rows, labels = open_labelled("docstring_match")
    assert labels == ["other", "same"]
    own, where = dict(pairs), {said: name for name in ("train", "valid", "test") for _, said, _ in rows.split(name)}
    for name in ("train", "valid", "test"):
        for body, said, label in rows.split(name):
            assert (own[body] == said) == (label == "same")
            assert where[said] == name  # or it would tell by having been seen in training
        share = sum(label == "same" for *_, label in rows.split(name)) / len(rows.split(name))
        assert 0.3 < share < 0.7


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (lambda f: (f / "set_dev.tsv").unlink(), {}, "whose name says valid or validation or val or dev, but has none"),
        (lambda f: shutil.copy(f / "set_dev.tsv", f / "b_dev.tsv"), {}, "but has b_dev.tsv and set_dev.tsv"),
        (
            lambda f: (f / "set_test.tsv").write_text("sentence\tlabel\na cat\t2\n"),
            {},
            "has the label '2', which no row",
        ),
        (lambda f: (f / "set_test.tsv").write_text("sentence\tlabel\na cat\n"), {}, "line 2 of"),
        (
            lambda f: (f / "set_train.tsv").write_text("sentence\tlabel\na\t1\nb\t1\n"),
            {},
            "have the label '1'; give at",
        ),
        (lambda f: (f / "set_train.tsv").write_bytes(b"sentence\tlabel\n\xe9\t1\n"), {}, "is not UTF-8"),
        (lambda f: None, {"label": "stars"}, "has no column 'stars', but sentence, label"),
        (lambda f: None, {"columns": ("review",)}, "has no column 'review'"),
        (lambda f: None, {"columns": ("a", "b", "c")}, "one column of texts, or two"),
        (lambda f: (f / "set_train.tsv").write_text("x\tlabel\na\t1\n"), {}, "say which hold the texts"),
    ],
)
def test_bad_labelled_files_are_one_clear_line(labelled, spoil, options, words):
    spoil(labelled)
    with pytest.raises(MixerError) as caught:
        open_labelled(str(labelled), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.tsv", b"x\ty\nsome\ttext\n", "say which is the text: --data.column NAME"),
        ("a.jsonl", b"nonsense\n", "line 1 of"),
        ("a.jsonl.xz", b"\xfd7zXZ\x00nonsense", "cannot be read"),
        ("a.txt", b"one document\n", "leave none for"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "' + b"a" * (65 << 20) + b'"}\n'), "but only 67108864 are allowed"),
    ],
)
def test_bad_documents_are_one_clear_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MixerError) as caught:
        open_documents(str(tmp_path / name))
    assert words in str(caught.value)


def test_a_text_with_the_name_of_a_special_token_has_only_its_characters():
    words = Subwords.train(["a </s> <mask> <extra_0> b"] * 3, 300, sentinels=2)
    tokens = words.encode("a </s> <mask> <extra_0> b")
    assert min(tokens) >= len(SPECIAL)
    assert not set(tokens) & set(words.sentinels)
    assert words.decode(tokens) == "a </s> <mask> <extra_0> b"


def test_names_of_masks_and_sentinels_are_tokens_where_they_are_asked_for():
    words = Subwords.train(["the cat runs", "a dog sleeps"] * 3, 300, sentinels=2)
    text = "the <extra_0> runs <mask> <extra_1>"
    tokens = words.encode_marked(text)
    assert tokens == [*words.encode("the"), 4, *words.encode("runs"), MASK, 5]
    assert (
        words.decode_marked([4, *words.encode("cat"), 5, *words.encode("a dog"), END])
        == "<extra_0> cat <extra_1> a dog"
    )
    assert words.encode_marked("<extra_2>") == words.encode("<extra_2>")  # the tokenizer has two


# --- masks and spans ---


def test_masks_have_the_shares_of_bert():
    tokens = torch.randint(4, 1000, (64, 512), generator=torch.Generator().manual_seed(0))
    draws = torch.rand(3, 64, 512, generator=torch.Generator().manual_seed(1))
    hidden, targets = mask_tokens(tokens, torch.ones_like(tokens, dtype=torch.bool), draws, vocab=1000)
    chosen = targets != IGNORED
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(hidden[~chosen], tokens[~chosen])
    assert abs(chosen.double().mean() - 0.15) < 0.01
    now = hidden[chosen]
    assert abs((now == MASK).double().mean() - 0.8) < 0.02
    assert abs((now == tokens[chosen]).double().mean() - 0.1) < 0.02
    others = now[(now != MASK) & (now != tokens[chosen])]
    assert others.min() >= len(SPECIAL)
    assert others.max() < 1000


def test_whole_words_are_masked_together_and_special_tokens_never():
    words = Subwords.train(sentences(20), 290)
    rows = [[START, *words.encode(line), END] for line in sentences(40)]
    most = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (most - len(row)) for row in rows])
    begins = words.starts_word()
    assert all(words._tokenizer.id_to_token(i).startswith("Ġ") for i in range(4, words.vocab) if begins[i])
    draws = torch.rand(3, *tokens.shape, generator=torch.Generator().manual_seed(0))
    _, targets = mask_tokens(tokens, tokens >= 4, draws, vocab=words.vocab, rate=0.2, starts_word=begins)
    chosen = targets != IGNORED
    assert not chosen[tokens < 4].any()
    assert chosen.any(1).all()
    inside = ~begins[tokens] & (tokens >= 4)  # tokens that go on a word share its fate
    assert torch.equal(chosen[:, 1:][inside[:, 1:]], chosen[:, :-1][inside[:, 1:]])
    assert 0.1 < chosen[tokens >= 4].double().mean() < 0.35


def test_a_row_without_words_has_no_mask():
    tokens = torch.tensor([[START, END, PAD], [START, 7, END]])
    hidden, targets = mask_tokens(tokens, tokens >= 4, torch.full((3, 2, 3), 0.9), vocab=9)
    assert (targets[0] == IGNORED).all()
    assert targets[1].tolist() == [IGNORED, 7, IGNORED]
    assert torch.equal(hidden, tokens)  # 0.9 leaves what is chosen as it is


@pytest.mark.parametrize(("n", "rate", "mean"), [(2, 0.15, 3.0), (17, 0.15, 3.0), (100, 0.5, 3.0), (64, 0.15, 1.0)])
def test_spans_and_the_rest_are_the_text_again(n, rate, mean):
    tokens, sentinels = list(range(200, 200 + n)), list(range(4, 104))
    for seed in range(20):
        source, target = corrupt_spans(
            tokens, torch.Generator().manual_seed(seed), sentinels=sentinels, rate=rate, mean=mean
        )
        gone, now = {}, None
        for token in target:
            if token in sentinels:
                now = gone.setdefault(token, [])
            else:
                now.append(token)
        back = [t for token in source for t in (gone[token] if token in sentinels else [token])]
        assert back == tokens
        assert [t for t in source if t in sentinels] == list(gone) == sentinels[: len(gone)]
        assert sum(map(len, gone.values())) == max(round(n * rate), 1)
        assert all(gone.values())
        assert len(gone) == max(round(max(round(n * rate), 1) / mean), 1)


# --- packed rows ---


def test_packing_keeps_every_text_once_and_wastes_little():
    lengths = torch.randint(1, 65, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert len(rows) <= 1.05 * sum(lengths) / 64
    batches = PackedRows(lengths, most=64, batch_size=7, seed=3)
    epochs = [[batches.rows(e * len(batches) + s) for s in range(len(batches))] for e in (0, 1)]
    for epoch in epochs:
        assert sorted(i for batch in epoch for row in batch for i in row) == list(range(500))
    assert epochs[0] != epochs[1]
    assert PackedRows(lengths, most=64, batch_size=7, seed=3).rows(11) == batches.rows(11)


SPECS = [
    {"name": "attention", "heads": 2, "positions": {"name": "rotary"}},
    {"name": "aft_full"},
    {"name": "aft_local", "window": 3},
    {"name": "aft_forget"},
    {"name": "hydra"},
    {"name": "linear", "heads": 2},
    {"name": "lightconv", "heads": 2, "kernel_size": 3},
    {"name": "synthesizer_random", "heads": 2},
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
@pytest.mark.parametrize(("cls", "config"), [(Encoder, EncoderConfig), (LM, LMConfig)])
def test_packed_texts_do_not_see_each_other(spec, cls, config):
    torch.manual_seed(0)
    model = cls(config(dim=16, max_len=20, mixers=(spec,), layers=2, vocab=30, init_std=0.3)).double().eval()
    rows = [[torch.randint(4, 30, (n,)).tolist() for n in lengths] for lengths in ((7, 1, 9), (20,), (3, 4))]
    tokens, starts = packed_rows(rows, 20)
    packed = model(tokens, starts=starts)
    for row, texts in zip(packed, rows, strict=True):
        at = 0
        for text in texts:
            alone = model(torch.tensor([text]))[0]
            torch.testing.assert_close(row[at : at + len(text)], alone, rtol=0, atol=BY_DTYPE[torch.float64])
            at += len(text)
    assert torch.isfinite(packed).all()


def test_an_encoder_may_share_its_layers():
    torch.manual_seed(0)
    common = {"dim": 16, "max_len": 20, "mixers": ({"name": "aft_full"},), "vocab": 30, "init_std": 0.3}
    shared = Encoder(EncoderConfig(**common, layers=1, loop=LoopConfig(times=3))).double().eval()
    plain = Encoder(EncoderConfig(**common, layers=3)).double().eval()
    state = shared.state_dict()
    plain.load_state_dict(
        {
            name: state[name.replace("blocks.1.", "blocks.0.").replace("blocks.2.", "blocks.0.")]
            for name in plain.state_dict()
        }
    )
    tokens, mask = torch.randint(30, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = False
    torch.testing.assert_close(shared(tokens, mask), plain(tokens, mask), rtol=0, atol=BY_DTYPE[torch.float64])
    rows = [[[5, 6, 7], [8, 9]], [[4] * 7]]
    packed, starts = packed_rows(rows, 8)
    torch.testing.assert_close(
        shared(packed, starts=starts)[0, 3:5], shared(torch.tensor([[8, 9]]))[0], rtol=0, atol=BY_DTYPE[torch.float64]
    )


def test_blocks_without_biases_have_none():
    bare = {"name": "aft_simple", "qkv_bias": False, "out_bias": False}
    for cls, config in ((Encoder, EncoderConfig), (LM, LMConfig)):
        model = cls(config(dim=16, max_len=8, mixers=(bare,), mlp="swiglu", norm_type="rms", mlp_bias=False))
        assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_starts_are_refused_where_they_make_no_sense():
    tokens, mask = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)
    common = {"dim": 8, "max_len": 8, "mixers": ({"name": "hydra"},), "vocab": 9}
    encoder, classifier = Encoder(EncoderConfig(**common)), Encoder(EncoderConfig(**common, classes=2))
    sampled = LM(LMConfig(**common, sample_positions={"name": "offset", "longest": 8}))
    for call, words in (
        (lambda: encoder(tokens, starts=mask[:, :3]), "starts must be bool of the tokens' shape"),
        (lambda: encoder(tokens, starts=tokens), "starts must be bool"),
        (lambda: encoder(tokens, mask, starts=mask), "key_mask or starts, not both"),
        (lambda: classifier(tokens, starts=mask), "takes one text in each row"),
        (lambda: sampled(tokens, starts=mask), "sampled positions"),
    ):
        with pytest.raises(MixerError) as caught:
            call()
        assert words in str(caught.value)


def test_a_packed_language_model_predicts_no_start_of_the_next_text(folder):
    task = open_task(small("subwords", folder))
    (tokens, starts), targets = task.batch(0)
    assert not (targets == START).any()
    assert not (targets == PAD).any()
    assert starts.sum() > len(starts)
    same = targets != IGNORED
    assert torch.equal(targets[:, :-1][same[:, :-1]], tokens[:, 1:][same[:, :-1]])


@pytest.mark.parametrize("packed", [True, False])
def test_no_mask_falls_on_what_is_not_text(folder, packed):
    task = open_task(small("masked", folder, **{"data.packed": packed}))
    for step in range(5):
        batch, targets = task.batch(step)
        wanted = targets[targets != IGNORED]
        assert wanted.min() >= len(SPECIAL)
        assert len(wanted) >= len(targets)
        shown = batch.tokens.gather(1, batch.chosen)[targets != IGNORED]
        assert ((shown == MASK) | (shown >= len(SPECIAL))).all()


# --- training ---


@pytest.mark.parametrize(
    ("recipe", "packed"),
    [("masked", True), ("masked", False), ("subwords", True), ("subwords", False), ("spans", False)],
)
def test_an_interrupted_run_on_documents_equals_an_undisturbed_one(folder, tmp_path, recipe, packed):
    config = small(recipe, folder, **{"data.packed": packed, "train.eval_texts": 5})
    train(config, tmp_path / "whole", verbose=False)
    train(config.override({"train.steps": 3}), tmp_path / "cut", verbose=False)
    resume(tmp_path / "cut", changes={"train.steps": 6}, verbose=False)
    a, b = (load_run(tmp_path / name)[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert evaluate_run(tmp_path / "cut").cross_entropy == evaluate_run(tmp_path / "whole").cross_entropy


def test_what_an_evaluation_hides_does_not_depend_on_its_batches(folder):
    scores = []
    for batch in (1, 16):
        config = small("masked", folder, **{"train.eval_batch": batch})
        torch.manual_seed(0)
        model = Encoder(config.model).double().eval()
        scores.append(open_task(config).evaluate(model, "valid"))
    assert scores[0].tokens == scores[1].tokens > 20
    assert abs(scores[0].cross_entropy - scores[1].cross_entropy) < BY_DTYPE[torch.float64]


def test_bits_per_byte_are_the_cross_entropy_of_all_tokens_by_the_bytes(folder):
    config = small("subwords", folder)
    task = open_task(config)
    torch.manual_seed(0)
    model = LM(config.model).double().eval()
    score, nats = task.evaluate(model, "test"), 0.0
    with torch.no_grad():
        for document in task.documents("test"):
            for piece in document:
                logits = model(torch.tensor([piece[:-1]]))[0].log_softmax(-1)
                nats -= float(logits[range(len(piece) - 1), piece[1:]].sum())
    size = sum(len(text.encode()) for (text,) in task.text.split("test"))
    assert score.bits_per_byte == pytest.approx(nats / size / 0.6931471805599453, rel=1e-9)


def test_targets_are_gathered_where_they_are():
    targets = torch.tensor([[IGNORED, 5, IGNORED, 6], [7, IGNORED, IGNORED, IGNORED]])
    chosen, said = chosen_of(targets)
    assert chosen.tolist() == [[1, 3], [0, 0]]
    assert said.tolist() == [[5, 6], [7, IGNORED]]


def test_a_masked_model_learns_and_a_classifier_starts_from_it(labelled, tmp_path):
    changes = {"train.steps": 150, "train.eval_every": 150, "train.save_every": 150, "train.batch_size": 16}
    config = small("masked", labelled, **{**changes, "model.dim": 32})
    train(config, tmp_path / "masked", verbose=False)
    first, *_ = [line for line in (tmp_path / "masked" / "metrics.jsonl").read_text().splitlines()]
    assert evaluate_run(tmp_path / "masked").cross_entropy < json.loads(first)["loss"] - 2
    assert any((tmp_path / "masked" / "samples").iterdir())
    start = {**changes, "model.dim": 32, "train.init": str(tmp_path / "masked"), "optim.warmup": 5}
    pretrained = small("sentences", labelled, **start)
    task = open_task(pretrained)
    assert task.subwords.json == (tmp_path / "masked" / "tokenizer.json").read_text()
    train(pretrained, tmp_path / "sentences", verbose=False)
    score = evaluate_run(tmp_path / "sentences")
    assert score.accuracy > 0.9
    assert score.f1 > 0.85
    assert score.matthews > 0.7
    assert classify_run(tmp_path / "sentences", "the old cat sleeps")[0][0] == "1"
    assert classify_run(tmp_path / "sentences", "the old dog sleeps")[0][0] == "0"
    guesses = fill_run(tmp_path / "masked", "the <mask> runs and <mask>", n=3)
    assert len(guesses) == 2
    assert all(word in WORDS for word, _ in guesses[0])
    assert write_report([tmp_path / "masked", tmp_path / "sentences"], tmp_path / "report.html").stat().st_size > 10_000


def test_a_new_classifier_keeps_its_own_head_and_takes_the_rest(labelled, tmp_path):
    train(small("masked", labelled, **{"train.eval_texts": 5}), tmp_path / "masked", verbose=False)
    source, _ = load_run(tmp_path / "masked")
    config = small(
        "sentences", labelled, **{"train.init": str(tmp_path / "masked"), "train.steps": 1, "optim.lr": 1e-9}
    )
    train(config.override({"optim.muon_lr": 1e-9}), tmp_path / "new", verbose=False)
    new = load_run(tmp_path / "new")[0].state_dict()
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(new[name], tensor, rtol=0, atol=1e-6)
    assert new["classifier.weight"].shape == (2, 16)


def test_f1_and_correlation_are_those_of_the_definition(labelled):
    config = small("sentences", labelled)
    task = open_task(config)
    torch.manual_seed(1)
    model = Encoder(config.model).double().eval()
    model.classifier.weight.data *= 50
    score, rows = task.evaluate(model, "valid"), task.text.split("valid")
    said = [int(model(torch.tensor([tokens])).argmax()) for tokens in task.tokens_of(rows)]
    n = {
        (a, b): sum(int(row[-1]) == a and s == b for row, s in zip(rows, said, strict=True))
        for a in (0, 1)
        for b in (0, 1)
    }
    assert score.accuracy == pytest.approx((n[0, 0] + n[1, 1]) / 60)
    f1 = [2 * n[k, k] / max(2 * n[k, k] + n[0, 1] + n[1, 0], 1) for k in (0, 1)]
    assert score.f1 == pytest.approx(sum(f1) / 2)
    margins = (n[1, 1] + n[1, 0]) * (n[1, 1] + n[0, 1]) * (n[0, 0] + n[1, 0]) * (n[0, 0] + n[0, 1])
    wanted = (n[1, 1] * n[0, 0] - n[1, 0] * n[0, 1]) / margins**0.5 if margins else 0.0
    assert score.matthews == pytest.approx(wanted)


@pytest.mark.parametrize("sizes", [(3,), (30,), (5, 4), (30, 4), (4, 30), (20, 25), (25, 25), (9, 9)])
def test_of_a_pair_the_longer_text_is_cut(sizes):
    texts = [[10 + i] * n for i, n in enumerate(sizes)]
    row = join_texts(texts, 20)
    kept = [row.count(10 + i) for i in range(len(sizes))]
    room = 20 - 1 - len(sizes)
    assert row[0] == START
    assert row[-1] == END
    assert row.count(END) == len(sizes)
    assert len(row) <= 20
    assert sum(kept) == min(sum(sizes), room)
    for n, k in zip(sizes, kept, strict=True):
        assert k == n or k >= max(kept) - 1  # a text that is cut is the longer one


# --- verbs and errors ---


def test_the_verbs_of_masked_models_and_classifiers(labelled, tmp_path, capsys):
    sizes = ["--model.dim", "16", "--model.layers", "1", "--model.vocab", "400", "--train.steps", "4"]
    for recipe in ("masked", "sentences", "subwords", "spans"):
        run = str(tmp_path / recipe)
        assert main(["train", recipe, "--data", str(labelled), "--out", run, *sizes]) == 0
        assert main(["eval", run, "--split", "valid", "--max-texts", "9", "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["texts"] == 9
    assert main(["sample", str(tmp_path / "masked"), "--prompt", "the <mask> sleeps"]) == 0
    assert capsys.readouterr().out.startswith("1: ")
    assert main(["sample", str(tmp_path / "sentences"), "--prompt", "the cat sleeps", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["labels"]
    assert set(found) == {"0", "1"}
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    assert main(["sample", str(tmp_path / "subwords"), "--prompt", "the cat", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert main(["sample", str(tmp_path / "spans"), "--prompt", "the <extra_0> sleeps <extra_1>"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    for run, prompt, words in (
        ("masked", "the cat", "must have a <mask>"),
        ("sentences", "a\tb", "reads 1 text, got 2"),
        ("sentences", " ", "reads 1 text, got 0"),
        ("subwords", "cat " * 200, "subwords; the model reads at most"),
        ("spans", "the cat", "must have a sentinel to fill in, such as <extra_0>"),
    ):
        assert main(["sample", str(tmp_path / run), "--prompt", prompt]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(MixerError, match="counts subwords"):
        sample_run(tmp_path / "subwords", n=4)


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("masked", {"data.rate": 0.0}, "data.rate must be in (0, 1)"),
        ("masked", {"data.max_tokens": 2}, "data.max_tokens must be in 3..model.max_len=24, got 2"),
        ("masked", {"model.classes": 2}, "is trained on data of kind 'labels'"),
        ("masked", {"data.batch_tokens": 99}, "data.packed fills train.batch_size rows"),
        ("spans", {"data.packed": True}, "which an encoder-decoder does not take"),
        ("spans", {"data.span": 0.5}, "data.span must be at least 1"),
        ("sentences", {"model.classes": 0}, "labelled texts need model.classes"),
    ],
)
def test_options_out_of_range_are_one_clear_line(labelled, recipe, changes, words):
    with pytest.raises(MixerError) as caught:
        small(recipe, labelled, **changes)
    assert words in str(caught.value)


def test_tokenizers_and_labels_that_do_not_fit_are_refused(labelled, tmp_path):
    (tmp_path / "plain.json").write_text(Subwords.train(sentences(30), 300).json)
    with pytest.raises(MixerError, match="has no sentinels"):
        open_task(small("spans", labelled, **{"data.tokenizer": str(tmp_path / "plain.json")}))
    with pytest.raises(MixerError, match=r"model.vocab=280; set model.vocab to"):
        open_task(small("masked", labelled, **{"data.tokenizer": str(tmp_path / "plain.json"), "model.vocab": 280}))
    with pytest.raises(MixerError, match="has 2 labels"):
        open_task(small("sentences", labelled, **{"model.classes": 3}))
    with pytest.raises(MixerError, match="104 special tokens need model.vocab >= 360"):
        open_task(small("spans", labelled, **{"model.vocab": 300}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"labels": ["1", "0"], "texts": 1}', r"labels.json changed since the run began: it was 0, 1; restore"),
        ('{"labels": ["0", "1"], "texts": 7}', "labels.json changed since the run began"),
        ('["0", "1"]', "labels.json changed since the run began"),
        ('{"labels": ["0"', "labels.json is not readable JSON"),
        (None, "labels.json is missing"),
    ],
)
def test_labels_that_are_not_those_of_the_run_are_refused(labelled, tmp_path, content, said):
    """Labels in another order would name every class wrongly, without a word."""
    run = tmp_path / "run"
    train(small("sentences", labelled, **{"train.eval_texts": 5}), run, verbose=False)
    assert {label for label, _ in classify_run(run, "the old cat sleeps")} == {"0", "1"}
    (run / "labels.json").unlink()
    if content is not None:
        (run / "labels.json").write_text(content)
    for read in (
        lambda: classify_run(run, "the old cat sleeps"),
        lambda: explain_runs([run], "the old cat sleeps"),
        lambda: export_run(run, tmp_path / "exported"),
    ):
        with pytest.raises(MixerError, match=said):
            read()
    assert not (tmp_path / "exported").exists()


def test_changed_documents_are_refused(labelled, tmp_path):
    train(small("masked", labelled, **{"train.eval_texts": 5}), tmp_path / "run", verbose=False)
    with (labelled / "set_train.tsv").open("a") as f:
        f.write("a new line\t1\n")
    with pytest.raises(MixerError, match="changed since this run began"):
        resume(tmp_path / "run", changes={"train.steps": 9}, verbose=False)
