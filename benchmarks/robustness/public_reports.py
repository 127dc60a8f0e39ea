"""Thirty public bug reports of other projects, drawn by lot, each tried on this library.

Sixty-nine reports on twenty kinds of defects were found by a search of issue trackers; ``random.Random(20261128)``
drew these from their list. Each attempt says what this library does where the other project was wrong.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix import MIXERS, MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import Subwords, open_documents, open_images, open_labelled, open_masks, open_points
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, resume, train
from tokenmix.mixers import example_mixer
from tokenmix.models import LM, EncoderConfig, LMConfig, Seq2Seq, Seq2SeqConfig, build_model

from . import attempt, run_command

TEXT = "the cat sat on the mat and the dog ran home fast under a blue sun"
WORDS = TEXT.split()


def _text(path: str = "a.txt", lines: int = 900) -> str:
    rows = (" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 9)) for i in range(lines))
    Path(path).write_text("\n".join(rows) + "\n")
    return path


def _config(steps: int = 6, **fields: Any) -> RunConfig:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
    model = LMConfig(dim=16, max_len=32, mixers=({"name": "aft_simple"},), layers=1)
    loop = TrainConfig(steps=steps, batch_size=4, log_every=1, eval_every=6, eval_bytes=400, save_every=3)
    config = RunConfig(model, DataConfig(_text(), seq_len=32), OptimConfig(warmup=0), loop)
    return config.override({"train.device": "cpu", "train.threads": 1, "train.sample_bytes": 0, **fields})


def _losses(run: str) -> list[float]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def _weights(run: str, step: int) -> bytes:
    return next(Path(run, "checkpoints", f"step_{step:08d}").glob("model*")).read_bytes()


def _said(call: Any) -> str:
    """What a call returns, or the one line of its refusal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(call())
    except MixerError as why:
        return f"refused: {why}".replace(str(Path.cwd()), ".")


def _command(*argv: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(argv))
    lines = (out if code == 0 else err).getvalue().strip().splitlines()
    return f"{code}: {lines[-1] if lines else 'no word'}".replace(str(Path.cwd()), ".")


def _ranks(run: str, ranks: int, *options: str) -> str:
    train_command = ("train", "text", "--data", "a.txt", "--data.seq_len", "32", "--out", run)
    done = run_command(*train_command, *options, ranks=ranks)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"


def _valid_score(run: str) -> float:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return next(line["bits_per_byte"] for line in reversed(lines) if line["kind"] == "eval")


def _scores_over_ranks(ranks: int) -> str:
    _config()
    options = ["--model.dim=16", "--model.max_len=32", "--model.layers=1", "--train.steps=1", "--train.eval_bytes=333"]
    options += ["--train.batch_size=6", "--train.threads=1", "--train.device=cpu", "--optim.lr=1e-9"]
    said = [_ranks(f"on{n}", n, *options) for n in (1, ranks)]
    if any(said):
        return "; ".join(filter(None, said))
    one, more = _valid_score("on1"), _valid_score(f"on{ranks}")
    return f"the same score within 1e-6: {abs(one - more) < 1e-6}"


@attempt("1", "roboflow/rf-detr#1507: metrics over ranks count the duplicates that pad the split")
def duplicates_over_ranks() -> str:
    """333 bytes do not divide by two."""
    return _scores_over_ranks(2)


@attempt("2", "eth-easl/modyn#473: a quote character in a column loses the rows that follow")
def stray_quote() -> str:
    """One row of 60 begins with a quote that nothing ends."""
    rows = [f"{'big ' * (i % 3)}text {i}\t{'pos' if i % 2 else 'neg'}" for i in range(60)]
    rows[20] = '"open ' + rows[20]
    Path("t.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    return _said(
        lambda: f"{sum(len(open_labelled('t.tsv')[0].split(s)) for s in ('train', 'valid', 'test'))} of 60 rows"
    )


@attempt("3", "JH-DSAI/text-detection-baselines#35: malformed rows of a .jsonl file are dropped without a count")
def malformed_rows() -> str:
    """One of 50 lacks its text."""
    rows = [json.dumps({"text": f"text {i}"} if i != 7 else {"body": "x"}) for i in range(50)]
    Path("d.jsonl").write_text("\n".join(rows) + "\n")
    return _said(lambda: open_documents("d.jsonl"))


@attempt("4", "sacdallago/biotrainer#102: padding changes outputs in convolutions and in attention")
def padding_in_every_mixer() -> str:
    """Every mixer that takes a mask, the row alone against the same row padded on the left and on the right."""
    wrong, tried = [], 0
    for name in MIXERS:
        mixer = example_mixer(name, 16, T=12).eval()
        x, mask = torch.randn(2, 12, 16), torch.ones(2, 12, dtype=torch.bool)
        for left in (True, False):
            mask[0] = (torch.arange(12) >= 4) if left else (torch.arange(12) < 8)
            real = x[:1, 4:] if left else x[:1, :8]
            try:
                alone, padded = mixer(real), mixer(x, key_mask=mask)[:1][:, mask[0]]
            except MixerError:
                continue
            tried += 1
            if not torch.allclose(alone, padded, atol=1e-5):
                wrong.append(name)
    return f"{len(wrong)} of {tried} differ{': ' if wrong else ''}{', '.join(wrong)}"


def _round_trip(texts: list[str]) -> str:
    subwords = Subwords.train(["the cat  sat\n", "on the\tmat. "] * 20, 300)
    lost = [text for text in texts if subwords.decode(subwords.encode(text)) != text]
    return f"{len(texts) - len(lost)} of {len(texts)} texts come back as they were"


@attempt("5", "dotnet/machinelearning#7716: byte-level BPE loses spaces and line ends without a word")
def byte_level_spaces() -> str:
    """Runs of spaces, other scripts, control characters."""
    return _round_trip(["a  b", " a", "a\n\n b\t", "ä ö", "日本 語", "e\u0301", "\u00a0x", "😀 !", "\r\n", " "])


@attempt("6", "rasbt/LLMs-from-scratch#1064: encoding and decoding changes white space and dashes")
def words_and_dashes() -> str:
    """The report's own texts."""
    return _round_trip(["hello--world", "Hello,   world. Is this-- a test?", "a\nb", "in the  sunlit terraces"])


@attempt("7", "intel/xFasterTransformer#326: softmax overflows where the maximum is not taken off")
def large_logits() -> str:
    """Keys of 1e4 in every mixer."""
    bad = []
    for name in MIXERS:
        mixer = example_mixer(name, 16, T=12).eval()
        with torch.no_grad():
            if not mixer(1e4 * torch.randn(2, 12, 16)).isfinite().all():
                bad.append(name)
    return f"{len(bad)} of {len(MIXERS)} mixers are not finite{': ' if bad else ''}{', '.join(bad)}"


@attempt("8", "RUCAIBox/RecBole#1872: an evaluation over ranks divides by a padded number of samples")
def padded_count() -> str:
    """Three ranks."""
    return _scores_over_ranks(3)


@attempt("9", "qubvel/segmentation_models#553: a class that is only predicted does not count in mIoU")
def class_only_predicted() -> str:
    """Two classes in the masks, a third in the prediction: (1/2 + 1 + 0) / 3."""
    from tokenmix.lab.train.mask_scores import confusion_matrix, intersection_over_union

    iou = intersection_over_union(confusion_matrix(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]), 4))
    return f"IoU {[round(v, 3) for v in iou.tolist()]}, mean {float(iou.nanmean()):.3f}"


def _resumed(**fields: Any) -> str:
    whole, half = _config(8, **fields), _config(4, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = {"optim.schedule": "constant"}
        train(whole.override(schedule), "whole")
        train(half.override(schedule), "half")
        resume("half", changes={"train.steps": 8})
    same = _weights("whole", 8) == _weights("half", 8)
    return f"the same losses: {_losses('whole') == _losses('half')}, the same bits of weights: {same}"


@attempt("10", "atomistic-machine-learning/schnetpack#785: a resume goes on from the average of the weights")
def resume_with_average() -> str:
    """Averages are evaluated in the place of the weights; the last step is an evaluation."""
    return _resumed(**{"optim.ema": 0.9, "train.eval_every": 4})


def _translator(vocab: int = 6) -> Seq2Seq:
    torch.manual_seed(0)
    mixers = ({"name": "attention", "heads": 2},)
    model = Seq2Seq(Seq2SeqConfig(dim=8, max_len=8, mixers=mixers, vocab=vocab, start=0, end=1)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model


def _target_scores(model: Seq2Seq, source: Tensor, n: int, vocab: int) -> dict[tuple[int, ...], float]:
    """The sum of log-probabilities of every target of at most n tokens that ends."""
    scores = {}
    for length in range(1, n + 1):
        for tokens in itertools.product([t for t in range(vocab) if t != 1], repeat=length - 1):
            target = torch.tensor([[0, *tokens, 1]])
            with torch.no_grad():
                logs = model(source, target[:, :-1]).double().log_softmax(-1)
            scores[(*tokens, 1)] = float(logs.gather(-1, target[:, 1:, None]).sum())
    return scores


def _best_of_beams(penalty: float) -> str:
    """Wide beams against all targets, over sources."""
    model, right = _translator(), 0
    for i in range(6):
        source = torch.tensor([[2 + i % 4, 2 + (i * 3) % 4, 5]])
        scores = _target_scores(model, source, 4, 6)
        best = max(scores, key=lambda t: scores[t] / len(t) ** penalty)
        found = model.generate(source, 4, beams=800, length_penalty=penalty)[0].tolist()
        right += tuple(found[: len(best)]) == best
    return f"{right} of 6 are the best of all targets"


@attempt("11", "OpenNMT/OpenNMT-py#1320: the number of hypotheses that are kept changes which is best")
def best_of_many() -> str:
    """With a length penalty of 1, the mean."""
    return _best_of_beams(1.0)


@attempt("12", "facebookresearch/maskrcnn-benchmark#633: an evaluation in other batches gives another score")
def evaluation_batches() -> str:
    """Batches of 1, 4 and 16 windows."""
    scores = []
    for n in (1, 4, 16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(_config(**{"train.eval_batch": n}), f"run{n}")
        scores.append(_valid_score(f"run{n}"))
    return f"the same score within 1e-6: {max(scores) - min(scores) < 1e-6}"


@attempt("13", "hao-ai-lab/FastVideo#1440: the average of the weights is dropped at a resume")
def average_kept() -> str:
    """The score of the average after a resume against that of a run without a stop."""
    said = _resumed(**{"optim.ema": 0.99, "train.eval_every": 8})
    return f"{said}; the same score: {_valid_score('whole') == _valid_score('half')}"


@attempt("14", "joeynmt/joeynmt#149: the search stops when the first beam ends though another could win")
def early_stop() -> str:
    """With a length penalty of 2, which prefers long targets."""
    return _best_of_beams(2.0)


@attempt("15", "chiendb97/oasr#101: rows whose keys are all masked are NaN")
def rows_without_keys() -> str:
    """A row of the batch that is padding only, in every mixer that takes a mask, forward and backward."""
    bad, tried = [], 0
    for name in MIXERS:
        mixer, mask = example_mixer(name, 16, T=12), torch.ones(2, 12, dtype=torch.bool)
        mask[0] = False
        x = torch.randn(2, 12, 16, requires_grad=True)
        try:
            y = mixer(x, key_mask=mask)
        except MixerError:
            continue
        y[1].sum().backward()
        tried += 1
        if not (y.isfinite().all() and (x.grad is None or x.grad.isfinite().all())):
            bad.append(name)
    return f"{len(bad)} of {tried} are not finite{': ' if bad else ''}{', '.join(bad)}"


@attempt("16", "triton-inference-server/fastertransformer_backend#53: prompts of other lengths change what follows")
def prompts_of_two_lengths() -> str:
    """In transformers, padded on the left, five mixers, greedy."""
    from tokenmix.hosts.huggingface import TokenMixConfig, TokenMixForCausalLM

    same = []
    for spec in ({"name": "attention"}, {"name": "aft_local", "window": 4}, {"name": "hydra"}, {"name": "aft_conv"}):
        torch.manual_seed(0)
        config = TokenMixConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=2, mixers=[spec], initializer_range=0.5, pad_token_id=0
        )
        model, x = TokenMixForCausalLM(config).eval(), torch.randint(3, 99, (2, 7))
        x[0, :3], mask = 0, torch.ones(2, 7, dtype=torch.long)
        mask[0, :3] = 0
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
        both = model.generate(x, attention_mask=mask, **options)[:, 7:]
        alone = model.generate(x[:1, 3:], **options)[:, 4:]
        same.append(bool((both[:1] == alone).all()))
    return f"{sum(same)} of {len(same)} mixers write the same text"


PLY = "ply\nformat ascii 1.0\n{extra}element vertex 8\n{columns}end_header\n{rows}"


def _clouds(write: Any) -> str:
    """Two classes of clouds, the files of one written by ``write``; what the first cloud holds."""
    for name in "ab":
        for i in range(12):
            file = Path("pts", name, "train" if i < 8 else "test", f"{i}.ply")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(write(i))

    def first() -> str:
        found = open_points("pts")
        return f"{sum(len(found._splits[s]) for s in ('train', 'test'))} clouds; {found.describe()}"

    return _said(first)


def _rows(order: str, special: str | None = None) -> str:
    values = {"x": 1, "y": 2, "z": 3, "r": 200, "g": 0.5}
    rows = [" ".join(str(values[c] + (i if c in "xyz" else 0)) for c in order) for i in range(8)]
    if special:
        rows[3] = special
    return "\n".join(rows) + "\n"


def _columns(order: str) -> str:
    return "".join(f"property {'uchar' if c == 'r' else 'float'} {c}\n" for c in order)


@attempt("17", "cartographer-project/point_cloud_viewer#8: columns of a .ply are read by their order")
def ply_columns() -> str:
    """Colour, z, x, y."""
    from tokenmix.lab.data.point_files import read_points

    Path("c.ply").write_text(PLY.format(extra="", columns=_columns("rzxy"), rows=_rows("rzxy")))
    return _said(lambda: f"the first point is {[round(v, 3) for v in read_points(Path('c.ply'))[0].tolist()]}")


@attempt("18", "mozilla/DeepSpeech#447: a restart overwrites the last checkpoint")
def restart() -> str:
    """The same command a second time, in the folder of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(_config(), "run")
        before = _weights("run", 6)
        said = _said(lambda: train(_config(), "run"))
    return f"{said[:120]}; the checkpoint is as it was: {_weights('run', 6) == before}"


@attempt("19", "howervoo/speechturn#14: sampling fails where all allowed logits are -inf")
def nothing_allowed() -> str:
    """A head of NaN and one of -inf."""
    said = []
    for value in (float("nan"), float("-inf")):
        torch.manual_seed(0)
        lm = LM(LMConfig(dim=16, max_len=32, mixers=({"name": "aft_simple"},), layers=1)).eval()
        torch.nn.init.constant_(lm.head.bias if lm.head.bias is not None else lm.head.weight, value)
        said.append(_said(lambda lm=lm: lm.generate(torch.tensor([[65]]), 3, temperature=0.8).tolist()))
    return "; ".join(each[:110] for each in said)


@attempt("20", "facebookresearch/metaseq#53: checkpoint files of zero bytes are left and taken")
def empty_checkpoint() -> str:
    """The weights of the newest checkpoint are emptied, then the run is resumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(_config(), "run")
    next(Path("run/checkpoints/step_00000006").glob("model*")).write_bytes(b"")
    return _command("resume", "run", "--train.steps", "7")


@attempt("21", "the-database/traiNNer-redux#193: images of 16 bits are read wrongly")
def sixteen_bits() -> str:
    """Grey ramps in 16 and in 8 bits."""
    import numpy as np
    from PIL import Image

    for name, dtype, top in (("wide", np.uint16, 65535), ("narrow", np.uint8, 255)):
        for c in "ab":
            for i in range(12):
                file = Path(name, c, f"{i}.png")
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((np.linspace(0, 1, 64).reshape(8, 8) * top).astype(dtype)).save(file)

    def off() -> str:
        wide, narrow = (open_images(name).split("train").image(0).int() for name in ("wide", "narrow"))
        return f"off by at most {int((wide - narrow).abs().max())} of 255"

    return _said(off)


@attempt("22", "NVIDIA/torch-harmonics#221: dropout of an attention layer goes on in eval mode")
def dropout_in_eval() -> str:
    """Of a language model; no mixer drops anything by itself."""
    lm = LM(LMConfig(dim=16, max_len=32, mixers=({"name": "attention", "heads": 2},), dropout=0.5)).eval()
    tokens = torch.tensor([[1, 2, 3]])
    return f"two calls differ: {not torch.equal(lm(tokens), lm(tokens))}"


@attempt("23", "OpenNMT/CTranslate2#290: an end in the lesser beams gives short hypotheses")
def short_hypotheses() -> str:
    """Without a length penalty."""
    return _best_of_beams(0.0)


@attempt("24", "PointCloudLibrary/pcl#2763: a .ply header with comments and obj_info is not read")
def ply_header() -> str:
    """As CloudCompare writes it."""
    extra = "comment Author: somebody\nobj_info Generated by somebody!\n"
    return _clouds(lambda i: PLY.format(extra=extra, columns=_columns("xyz"), rows=_rows("xyz")))


@attempt("25", "speechbrain/speechbrain#2986: a container drops the mask, so padding changes the encoder's output")
def encoder_padding() -> str:
    """An encoder of six kinds of mixers, a row alone against the same row padded."""
    names = ("attention", "aft_simple", "hydra", "lightconv", "linear", "aft_local")
    specs = tuple({"name": n, **({"window": 3} if n == "aft_local" else {})} for n in names)
    torch.manual_seed(0)
    encoder: Any = build_model(EncoderConfig(dim=16, max_len=16, mixers=specs, layers=6, vocab=50)).eval()
    tokens, mask = torch.randint(0, 50, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    mask[0, 7:] = False
    found = encoder(tokens, key_mask=mask), encoder(tokens[:1, :7])
    whole, alone = (f if isinstance(f, Tensor) else f[0] for f in found)
    return f"off by less than 1e-5: {bool((whole[:1, :7] - alone).abs().max() < 1e-5)}"


@attempt("26", "open-mmlab/mmsegmentation#1609: masks of 0 and 255 train to an IoU of 0")
def masks_of_255() -> str:
    """How many classes they have, and what is said."""
    import numpy as np
    from PIL import Image

    for i in range(12):
        for folder, ending, value in (("images", "jpg", 90), ("masks", "png", 255)):
            Path("set", folder).mkdir(parents=True, exist_ok=True)
            halves = np.zeros((8, 10), np.uint8)
            halves[: i % 5 + 2] = value
            Image.fromarray(halves).save(f"set/{folder}/{i}.{ending}")
    return _said(lambda: f"classes {open_masks('set').classes}")


@attempt("27", "KempnerInstitute/KempnerForge#51: a resume reads the first batches again")
def batches_after_a_resume() -> str:
    """Losses and weights against a run without a stop."""
    return _resumed()


@attempt("28", "Megvii-BaseDetection/YOLOX#1318: only averaged weights are saved, so a resume starts from them")
def both_weights() -> str:
    """With Muon too."""
    return _resumed(**{"optim.ema": 0.5, "optim.name": "muon"})


@attempt("29", "agokrani/distillKitPlus#5: the logged loss grows with the number of accumulation steps")
def logged_loss() -> str:
    """1, 2 and 4 parts of the same batches."""
    runs = []
    for n in (1, 2, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(_config(**{"train.accumulate": n}), f"run{n}")
        runs.append(_losses(f"run{n}"))
    off = max(abs(a - b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    usual = math.isclose(runs[0][0], math.log(256), rel_tol=0.1)
    return f"losses differ by less than 1e-4: {off < 1e-4}, the first is about log 256: {usual}"


@attempt("30", "mkazhdan/PoissonRecon#87: points that are NaN are accepted")
def nan_points() -> str:
    """One of eight points."""
    return _clouds(lambda i: PLY.format(extra="", columns=_columns("xyz"), rows=_rows("xyz", "nan 1 2")))
