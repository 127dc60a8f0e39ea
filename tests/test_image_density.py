"""The density of images: what it conditions on, what it counts, what it draws."""

from __future__ import annotations

import json
from math import log

import pytest
import torch
import torch.nn.functional as F

from perturb import perturb_mixers
from tokenmix import MixerError, reorder, state_bytes
from tokenmix.models import ImageDensity, ImageDensityConfig

LOCAL = {"name": "aft_local", "window": 6, "rank": 3}
ATTENTION = {"name": "attention", "heads": 2}
PAPER = {  # AFT Sec. 5.1 and its opponents
    "aft_local": (LOCAL,),
    "aft_local-table": ({**LOCAL, "rank": None},),
    "aft_simple": ({"name": "aft_simple"},),
    "attention": (ATTENTION,),
    "strided": ({"name": "strided", "heads": 2, "stride": 5},),
    "fixed": ({"name": "fixed", "heads": 2, "stride": 5, "columns": 2},),
    "local1d": ({"name": "image_local", "heads": 2, "block": 7, "memory": 5},),
    "local2d": ({"name": "image_local", "heads": 2, "ndim": 2, "block": [2, 6], "memory": [1, 3]},),
    "hybrid": (LOCAL, ATTENTION),
}
CONSTANT = {"aft_local", "aft_local-table", "aft_simple", "local1d", "local2d"}
SIZE = (3, 5)  # N = 45


def drawn(name: str = "aft_local", **options) -> ImageDensity:
    """A small model as its constructor leaves it, with a large init_std."""
    torch.manual_seed(0)
    mixers = options.pop("mixers", PAPER[name])
    return ImageDensity(
        ImageDensityConfig(
            **{"dim": 16, "size": SIZE, "mixers": mixers, "layers": 2, "values": 20, "init_std": 0.3, **options}
        )
    ).eval()


def make(name: str = "aft_local", **options) -> ImageDensity:
    """The same with mixers of which everything shows in the logits."""
    return perturb_mixers(drawn(name, **options))


def images(rows: int = 2, size: tuple[int, int] = SIZE, values: int = 20, channels: int = 3) -> torch.Tensor:
    return torch.randint(values, (rows, channels, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def stream(model: ImageDensity, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    state, out = model.init_state(len(x)), []
    for a, b in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        logits, state = model.extend(x[:, a:b], state)
        out.append(logits)
    return torch.cat(out, 1)


def test_the_order_is_the_raster_with_colours_interleaved():
    model, x = make(), images()
    tokens = model.to_tokens(x)
    assert (model.max_len, model.image_shape) == (45, (3, 3, 5))
    for row, line, column, colour in [(0, 0, 0, 0), (1, 0, 0, 2), (0, 1, 0, 0), (1, 2, 4, 1)]:
        assert tokens[row, (line * 5 + column) * 3 + colour] == x[row, colour, line, column]
    assert torch.equal(model.to_images(tokens), x)


@pytest.mark.parametrize("name", PAPER)
@torch.no_grad()
def test_logits_see_what_is_before_them_and_no_more(name):
    model = make(name).double()
    x = model.to_tokens(images())
    full = model(x)
    assert full.shape == (2, 45, 20)
    for at in (0, 7, 30, 44):
        changed = x.clone()
        changed[:, at:] = (changed[:, at:] + 1) % 20
        assert (model(changed)[:, : at + 1] - full[:, : at + 1]).abs().max() <= 1e-12
    changed = x.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 20
    assert (model(changed) - full)[:, 21].abs().amax(-1).min() > 1e-4, "the sub-pixel before is read"


@torch.no_grad()
def test_the_first_sub_pixel_is_predicted_from_nothing():
    model = make("aft_simple").double()
    logits = model(model.to_tokens(images()))[:, 0]
    x = model.positions.weight[None, :1]
    for block in model.blocks:
        x = block(x)
    torch.testing.assert_close(logits, model.head(model.norm(x))[:, 0].expand(2, -1), rtol=0, atol=1e-12)
    assert not torch.equal(logits, make("aft_simple", positions=None).double()(model.to_tokens(images()))[:, 0])


@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"positions": None, "tied": True}])
@pytest.mark.parametrize("name", PAPER)
@torch.no_grad()
def test_streaming_equals_parallel(name, options):
    model = make(name, **options)
    x = model.to_tokens(images())
    full = model(x)
    assert full.std() > 0.1
    for cuts in ([1, 8, 30], list(range(1, 45))):
        torch.testing.assert_close(stream(model, x, cuts), full, rtol=0, atol=2e-5)


def test_streaming_past_the_last_sub_pixel_is_refused():
    model = make("aft_simple", positions=None)
    x = model.to_tokens(images())
    _, state = model.extend(x[:, :44], model.init_state(2))
    model.extend(x[:, 44:], state)
    with pytest.raises(MixerError, match="would end at 46"):
        model.extend(x[:, :2], state)


@pytest.mark.parametrize("name", ["routing", "reformer"])
@torch.no_grad()
def test_mixers_that_cannot_stream_draw_by_reading_everything_again(name):
    model = make(mixers=({"name": name, "heads": 2, "paper_form": True}, {"name": "aft_simple"}))
    assert not model.streams
    drawn = model.complete(images(2), 1, temperature=0)
    assert torch.equal(drawn[:, :, :1], images(2)[:, :, :1])
    tokens = model.to_tokens(drawn)
    for i in (15, 16, 30, 44):
        assert torch.equal(tokens[:, i], model._read(tokens[:, :i])[:, -1].argmax(-1))


@torch.no_grad()
def test_drawing_with_and_without_a_state_is_the_same(monkeypatch):
    model = make("hybrid")
    wanted = model.sample(2, seed=3)
    monkeypatch.setattr(type(model), "streams", False)
    assert torch.equal(model.sample(2, seed=3), wanted)


@torch.no_grad()
def test_states_can_be_reordered():
    model = make("hybrid")
    x = model.to_tokens(images(3))
    _, state = model.extend(x[:, :10], model.init_state(3))
    index = torch.tensor([2, 0, 0])
    got, _ = model.extend(x[index, 10:], reorder(state, index))
    torch.testing.assert_close(got, model(x[index])[:, 10:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PAPER)
@torch.no_grad()
def test_the_state_is_constant_where_the_mixer_s_is(name):
    model = make(name)
    x, state, sizes = model.to_tokens(images(1)), model.init_state(1), set()
    for token in x.split(1, 1):
        _, state = model.extend(token, state)
        sizes.add(state_bytes(state))
    assert (len(sizes) == 1) == (name in CONSTANT)


@pytest.mark.parametrize("name", PAPER)
def test_a_few_steps_bring_the_bits_down(name):
    model = make(name, init_std=0.05).train()
    x = model.to_tokens(images())
    optimizer, before = torch.optim.AdamW(model.parameters(), 1e-2), model.bits(x)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
        optimizer.step()
    assert (model.bits(x) < before - 0.1).all()


def test_bits_are_those_of_the_softmax_and_a_uniform_model_has_8():
    model = make(values=256)
    x = model.to_tokens(images(values=256))
    bits = model.bits(x)
    assert bits.dtype == torch.float64
    with torch.no_grad():
        nats = F.cross_entropy(model(x).double().transpose(1, 2), x, reduction="none").mean(1)
    torch.testing.assert_close(bits, nats / log(2), rtol=1e-13, atol=0)
    torch.nn.init.zeros_(model.head.weight)
    assert model.bits(x).tolist() == [8.0, 8.0]
    assert model.bits(x.to(torch.uint8)).tolist() == [8.0, 8.0]


def test_the_density_sums_to_one():
    """Over all 3^4 images of 2 x 2 grey pixels."""
    model = make(size=(2, 2), channels=1, values=3).double()
    every = torch.cartesian_prod(*[torch.arange(3)] * 4)
    assert (2.0 ** (-4 * model.bits(every))).sum().item() == pytest.approx(1, abs=1e-12)


def test_bits_leave_the_mode_and_know_no_dropout():
    model, x = make(dropout=0.5), make().to_tokens(images())
    still = model.bits(x)
    assert torch.equal(model.train().bits(x), still)
    assert model.training


def test_samples_follow_the_density():
    model = make("aft_simple", size=(1, 2), channels=1, values=3, init_std=0.8)
    drawn = model.to_tokens(model.sample(20_000, seed=0))
    found = (drawn[:, 0] * 3 + drawn[:, 1]).bincount(minlength=9) / 20_000
    wanted = 2.0 ** (-2 * model.bits(torch.cartesian_prod(torch.arange(3), torch.arange(3))))
    assert wanted.max() > 0.2
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.015)


@pytest.mark.parametrize("name", PAPER)
def test_samples_are_images_and_repeat_under_a_seed(name):
    model = make(name, dropout=0.5).train()
    before = torch.get_rng_state()
    a, b, c = (model.sample(2, seed=seed, top_p=0.9) for seed in (1, 1, 2))
    assert (a.dtype, a.shape) == (torch.uint8, (2, 3, *SIZE))
    assert int(a.max()) < 20
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", PAPER)
@torch.no_grad()
def test_greedy_completion_keeps_the_rows_and_is_the_argmax_of_the_parallel_form(name):
    model, x = make(name).double(), images()
    for rows in range(SIZE[0] + 1):
        out = model.complete(x, rows, temperature=0)
        assert torch.equal(out[:, :, :rows], x[:, :, :rows])
        tokens = model.to_tokens(out)
        start = rows * SIZE[1] * 3
        assert torch.equal(tokens[:, start:], model(tokens)[:, start:].argmax(-1))
    assert torch.equal(model.complete(x, 0, temperature=0), model.sample(2, top_k=1))


def test_completion_does_not_read_what_it_replaces():
    model, x = make(), images()
    other = x.clone()
    other[:, :, 1:] = 255  # no value of this model even
    assert torch.equal(model.complete(x, 1, seed=3), model.complete(other, 1, seed=3))
    assert not torch.equal(model.complete(x, 1, seed=3), model.complete(x, 1, seed=4))


@pytest.mark.parametrize("name", PAPER)
def test_one_sub_pixel_and_no_image(name):
    model = make(name, size=(1, 1), channels=1)
    assert model.sample(3).shape == (3, 1, 1, 1)
    assert model.bits(torch.zeros(2, 1, dtype=torch.long)).shape == (2,)
    model = make(name)
    nothing = torch.zeros(0, 45, dtype=torch.long)
    assert model(nothing).shape == (0, 45, 20)
    assert model.bits(nothing).shape == (0,)
    assert model.sample(0).shape == model.complete(images(0), 2).shape == (0, 3, *SIZE)
    assert stream(model, nothing, [1, 20]).shape == (0, 45, 20)


def count(dim: int, layers: int, spec: dict, **options) -> int:
    with torch.device("meta"):
        model = ImageDensity(ImageDensityConfig(dim=dim, size=(32, 32), mixers=(spec,), layers=layers, **options))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("dim", "layers", "spec", "total"),
    [
        (256, 24, {"name": "aft_local", "window": 256, "rank": 64}, 29_309_440),
        (512, 12, {"name": "aft_local", "window": 256, "rank": 64}, 44_383_232),
        (256, 24, {"name": "aft_local", "window": 256, "rank": None}, 246_364_672),
        (256, 24, {"name": "aft_simple"}, 19_872_256),
        (256, 24, {"name": "attention", "heads": 2}, 19_872_256),
        (512, 12, {"name": "attention", "heads": 4}, 39_664_640),
        (512, 12, {"name": "image_local", "heads": 4, "ndim": 2, "block": [8, 96], "memory": [8, 48]}, 39_664_640),
        (256, 128, {"name": "strided", "heads": 2, "stride": 96}, 102_007_296),
    ],
)
def test_the_paper_s_rows_have_their_sizes(dim, layers, spec, total):
    bias = 0 if "window" not in spec else 3072**2 if spec["rank"] is None else 2 * 3072 * 64
    block = 4 * dim * (dim + 1) + 8 * dim * dim + 5 * dim + 4 * dim + bias
    assert count(dim, layers, spec) == total == layers * block + 2 * 256 * dim + 3072 * dim + 2 * dim
    if bias and dim == 256:
        assert (bias + 4 * dim * dim) // 10**5 == (96 if spec["rank"] is None else 6), (
            "Table 3 prints 9.6M and 0.6M per layer, cut not rounded"
        )


def test_a_raster_s_width_is_filled_in():
    model = make("local2d")
    assert [block.mixer.width for block in model.blocks] == [15, 15]
    assert make(mixers=({**PAPER["local2d"][0], "width": 5},)).blocks[0].mixer.width == 5
    assert make(mixers=({"name": "axial", "heads": 2},)).blocks[0].mixer.width == 15
    assert make("local1d").blocks[0].mixer.width is None
    assert make().blocks[0].mixer.max_len == 45


@pytest.mark.parametrize("options", [{}, {"tied": True, "positions": None}])
def test_a_meta_build_reset_under_a_seed_is_a_direct_build(options):
    direct = drawn("hybrid", **options)
    with torch.device("meta"):
        built = ImageDensity(direct.config)
    built = built.to_empty(device="cpu")
    torch.manual_seed(0)
    built.reset_parameters()
    for (key, a), (_, b) in zip(direct.state_dict().items(), built.state_dict().items(), strict=True):
        assert torch.equal(a, b), key


def test_config_goes_to_json_and_back():
    config = ImageDensityConfig(
        dim=8, size=(4, 6), mixers=(LOCAL, ATTENTION), layers=3, channels=1, values=16, dropout=0.1
    )
    data = json.loads(json.dumps(config.to_json()))
    assert data["kind"] == "image_density"
    assert data["size"] == [4, 6]
    assert ImageDensityConfig.from_json(data) == config
    assert [spec["name"] for spec in config.specs()] == ["aft_local", "attention", "aft_local"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sise": 3}, "nearest: size"),
        ({"size": [4]}, r"two positive integers \(H, W\)"),
        ({"size": [4, 0]}, "two positive integers"),
        ({"size": 4}, "size must be a list"),
        ({"values": 257}, "at most 256"),
        ({"values": 0}, "values must be positive"),
        ({"channels": 0}, "channels must be positive"),
        ({"mixers": []}, "mixers is empty"),
        ({"kind": "lm"}, "is of kind 'image_density', got 'lm'"),
        ({"positions": "rotary"}, "rotary"),
    ],
)
def test_bad_configs_are_refused(change, words):
    with pytest.raises(MixerError, match=words):
        ImageDensityConfig.from_json({"dim": 8, "size": [4, 4], "mixers": [ATTENTION], **change})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({**LOCAL, "max_len": 44}, "45 sub-pixels, but a mixer has max_len=44"),
        ({"name": "fourier"}, "no causal form"),
        ({"heads": 2}, "with a name"),
    ],
)
def test_bad_specs_are_refused(spec, words):
    with pytest.raises(MixerError, match=words):
        make(mixers=(spec,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(torch.zeros(1, 44, dtype=torch.long)), "3 x 5 x 3 has 45 tokens, got 44"),
        (lambda m: m.bits(torch.zeros(1, 46, dtype=torch.long)), "got 46"),
        (lambda m: m(torch.zeros(1, 45)), "integer tokens"),
        (lambda m: m(torch.full((1, 45), 20)), "0..19, got 20 to 20"),
        (lambda m: m.bits(torch.full((1, 45), -1)), "0..19"),
        (lambda m: m.extend(torch.zeros(1, 46, dtype=torch.long), m.init_state(1)), "would end at 46"),
        (lambda m: m.extend(torch.zeros(1, 0, dtype=torch.long), m.init_state(1)), "1 or more"),
        (lambda m: m.extend(torch.zeros(1, 2, dtype=torch.long), m.init_state(2)), r"got \(1, 2\)"),
        (lambda m: m.to_tokens(images().float()), "uint8 images of shape .batch, 3, 3, 5., got torch.float32"),
        (lambda m: m.to_tokens(images(size=(5, 3))), r"got torch.uint8 \(2, 3, 5, 3\)"),
        (lambda m: m.complete(images(channels=1), 1), "uint8 images"),
        (lambda m: m.complete(images() + 200, 1), "0..19"),
        (lambda m: m.complete(images() + 200, 3), "0..19"),
        (lambda m: m.complete(images(), 4), r"0..3, the height of the images, got 4"),
        (lambda m: m.complete(images(), -1), "rows"),
        (lambda m: m.complete(images(), 1.5), "rows must be an integer"),
        (lambda m: m.sample(-1), "n must be an integer >= 0"),
        (lambda m: m.sample(1, temperature=-1.0), "temperature"),
        (lambda m: m.sample(1, top_p=0.0), "top_p"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(MixerError, match=words):
        call(make())
