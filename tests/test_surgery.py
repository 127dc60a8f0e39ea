"""Test replaced attention: with softmax the function stays the same in every family.

Every mixer that fits runs, masked, causal, and learns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perturb import perturb_mixers
from surgery_models import DECODERS, IMAGES, MAKERS, TRANSLATORS, make, padded, shared
from tokenmix import MIXERS, MixerError, functional
from tokenmix.hosts.huggingface.cache import name_cache_output
from tokenmix.hosts.surgery import find_attention, replace_mixers, restore
from tokenmix.mixers import required_options

TIGHT = 1e-5
CORE: list[Any] = [
    "aft_simple",
    {"name": "aft_local", "window": 3},
    {"name": "aft_full"},
    "hydra",
    "external_multihead",
    "linear",
    {"name": "local", "window": 4},
]
ROUNDING = (
    "whisper",
    "gemma",
    "granite",
    "stablelm",
)  # at a std of 0.5 float32 alone rounds their large logits by 1.1e-5 to 2.0e-5
TEXT = ("bert", "roberta", "gpt2", "llama")  # the others share their code


def name_of(spec: Any) -> str:
    return spec if isinstance(spec, str) else spec["name"]


def final(y: Any) -> Tensor:
    """Logits, hidden states, or the output itself."""
    for name in ("logits", "last_hidden_state"):
        if getattr(y, name, None) is not None:
            return getattr(y, name)
    return y


def outputs(name: str, model: Any, side: str = "left") -> Tensor:
    """What a model of this family gives at real tokens; its inputs are padded on that side, or "none"."""
    dtype = next(model.parameters()).dtype
    torch.manual_seed(3)
    if name in IMAGES:
        return final(model(torch.randn(2, 3, 32, 32).to(dtype)))
    if name == "detr":
        mask = torch.ones(2, 48, 48, dtype=torch.long)
        mask[1, :, 30:] = 0
        return final(model(pixel_values=torch.randn(2, 3, 48, 48).to(dtype), pixel_mask=mask))
    if name == "transformer":
        source, target, pad = (
            torch.randn(2, 7, 32).to(dtype),
            torch.randn(2, 5, 32).to(dtype),
            torch.zeros(2, 7, dtype=torch.bool),
        )
        pad[1, :2] = side == "left"
        pad[1, 5:] = side == "right"
        order = nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
        return model(
            source, target, tgt_mask=order, src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True
        )
    ids, mask = padded(side)
    if side == "none":
        return final(model(input_ids=ids, **({"decoder_input_ids": ids} if name in TRANSLATORS else {})))
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if name in TRANSLATORS:
        given |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": mask.flip(0)}
        mask = mask.flip(0)
    if name == "whisper":
        given = {k: v for k, v in given.items() if k.startswith("decoder")} | {
            "input_features": torch.randn(3, 8, 24).to(dtype)
        }
    if name in ("bert_decoder", "gpt2_decoder"):
        other = torch.ones(3, 6, dtype=torch.long)
        other[1, 3:] = 0
        given |= {"encoder_hidden_states": torch.randn(3, 6, 32).to(dtype), "encoder_attention_mask": other}
    return final(model(**given))[mask.bool()]


def nothing_lost(name: str, report: Any) -> None:
    """Every tensor has its place; Whisper has no bias of keys, which softmax would not see."""
    assert [
        each for each in report.names("new", "dropped") if not (name == "whisper" and each.endswith("k_proj.bias"))
    ] == []


@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_softmax_into_softmax_changes_nothing(name):
    model = shared(name, 0.3 if name in ROUNDING else 0.5)
    new, report = replace_mixers(model, "attention")
    nothing_lost(name, report)
    assert report.share == 1.0 or name == "whisper"
    assert find_attention(new) == []
    for side in ("left", "right") if name in ("whisper", "bert_decoder") else ("left", "right", "none"):
        wanted = outputs(name, model, side)
        size = wanted.abs().max()
        assert size > 0.5  # the comparison means something
        assert (outputs(name, new, side) - wanted).abs().max() <= TIGHT * size


@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_restore_gives_the_host_back_to_the_bit(name):
    model = shared(name)
    back, report = restore(replace_mixers(model, "attention")[0])
    assert [str(type(m)) for m in back.modules()] == [str(type(m)) for m in model.modules()]
    shifted = name in ("gemma3", "embedding_gemma")  # whose norms multiply by 1 + weight
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(
            back.state_dict()[key], tensor, atol=2.0**-24 if shifted and "_norm" in key else 0, rtol=0
        )
    nothing_lost(name, report)
    torch.testing.assert_close(outputs(name, back), outputs(name, model), atol=TIGHT if shifted else 0, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@torch.no_grad()
def test_both_kinds_of_mask_are_read(name, implementation):
    model = make(name)
    model.set_attn_implementation(implementation)
    new, _ = replace_mixers(model, {"*.1.*": "attention"})  # the other layer keeps its own
    assert (outputs(name, new) - outputs(name, model)).abs().max() <= TIGHT
    mixed, _ = replace_mixers(model, "aft_simple", seed=0)
    assert torch.isfinite(outputs(name, mixed)).all()


@pytest.mark.parametrize("spec", CORE, ids=name_of)
@pytest.mark.parametrize("name", TEXT)
@torch.no_grad()
def test_padding_changes_no_real_output_and_nothing_leaks(name, spec):
    new = perturb_mixers(replace_mixers(shared(name, 0.3), spec, seed=0)[0])
    for side in ("left", "right"):
        together = outputs(name, new, side)
        ids, mask = padded(side)
        alone = []
        for row, keep in zip(ids, mask.bool(), strict=True):
            where = {"position_ids": torch.arange(len(row))[None][:, keep]} if name in DECODERS else {}
            alone.append(final(new(input_ids=row[keep][None], **where))[0])
        if name == "gpt2" or (side == "left" and name == "bert"):  # learned positions of the host count padding
            continue
        assert (torch.cat(alone) - together).abs().max() <= 2e-5 * together.abs().max()
    ids, mask = padded(side)
    changed = ids.clone()
    changed[:, :3][mask[:, :3] == 0] = 17  # what stands at padding
    changed[:, 6:][mask[:, 6:] == 0] = 23
    assert (
        final(new(input_ids=changed, attention_mask=mask))[mask.bool()] - together
    ).abs().max() <= 2e-5 * together.abs().max()
    if name in DECODERS:
        later = torch.cat([ids[:1, :6], ids[:1, 6:] - 1], 1)
        assert (final(new(later))[:, :6] - final(new(ids[:1]))[:, :6]).abs().max() <= 2e-5 * together.abs().max()
        assert (final(new(later))[:, 6:] - final(new(ids[:1]))[:, 6:]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "spec"),
    [(name, spec) for name in DECODERS for spec in ["attention", *CORE] if spec == "attention" or name in TEXT],
)
@torch.no_grad()
def test_generate_with_cache_is_generate_without(name, spec):
    model = shared(name)
    new, _ = replace_mixers(
        model, {"*.0.*": spec} if name == "gpt2" else spec, seed=0
    )  # gpt2: one layer keeps keys and values
    new = new if spec == "attention" else perturb_mixers(new)
    ids, mask = padded("left")
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        found = new.generate(**given, num_beams=beams)
        assert torch.equal(found, new.generate(**given, num_beams=beams, use_cache=False))
    if spec == "attention":
        assert torch.equal(new.generate(**given), model.generate(**given))
    alone = [
        new.generate(ids[i : i + 1, 2 * i :], max_new_tokens=5, do_sample=False, pad_token_id=0)[0, -5:]
        for i in range(3)
    ]
    assert torch.equal(new.generate(**given)[:, -5:], torch.stack(alone))


@pytest.mark.parametrize(
    "specs",
    [{"*": "attention"}, {"*.self_attn": "aft_simple", "*.1.encoder_attn": "hydra"}, {"*encoder_attn": "attention"}],
    ids=repr,
)
@pytest.mark.parametrize("name", ["bart", "marian"])
@torch.no_grad()
def test_an_encoder_with_a_decoder_generates_with_cache_as_without(name, specs):
    model = shared(name)
    new, _ = replace_mixers(model, specs, seed=0)
    new = perturb_mixers(new) if "aft_simple" in specs.values() else new
    ids, mask = padded("right")
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        found = new.generate(ids, attention_mask=mask, num_beams=beams, **how)
        assert torch.equal(found, new.generate(ids, attention_mask=mask, num_beams=beams, use_cache=False, **how))
        if "aft_simple" not in specs.values():
            assert torch.equal(found, model.generate(ids, attention_mask=mask, num_beams=beams, **how))
    alone = [new.generate(ids[i : i + 1, : 9 - 2 * i], **how)[0] for i in range(3)]
    assert torch.equal(new.generate(ids, attention_mask=mask, **how), torch.stack(alone))


@torch.no_grad()
def test_a_cache_is_continued_in_chunks():
    new = perturb_mixers(replace_mixers(shared("llama"), ["aft_simple", {"name": "aft_local", "window": 3}], seed=0)[0])
    ids = padded("left")[0][:1]
    whole, past, parts = new(ids).logits, None, []
    for chunk in ids.split([4, 1, 3, 1], 1):
        y = new(chunk, use_cache=True, **name_cache_output(past))
        past, parts = y.past_key_values, [*parts, y.logits]
    assert (torch.cat(parts, 1) - whole).abs().max() <= TIGHT * whole.abs().max()
    with pytest.raises(MixerError, match="model.layers.0.self_attn: this cache holds keys and values of another"):
        new(ids, **name_cache_output(shared("llama")(ids).past_key_values))
    with pytest.raises(MixerError, match="got a cache as later_name, and knows cache, past_key_values"):
        new.model.layers[0].self_attn(torch.zeros(1, 2, 32), later_name=past)
    with pytest.raises(MixerError, match="static cache"):
        new.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)


NEEDS: dict[str, dict[str, Any]] = {"aft_local": {"window": 3}, "aft_conv": {"heads": 4, "kernel_size": 3}}


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "timm", "transformer"])
def test_every_mixer_that_fits_runs_and_learns(name, mixer):
    pattern = "encoder.*" if name == "transformer" else "*"
    needs_length = "max_len" in required_options(MIXERS[mixer])
    spec = {
        "name": mixer,
        **NEEDS.get(mixer, {}),
        **({"max_len": 12} if name == "transformer" and needs_length else {}),
    }
    if name in DECODERS and not MIXERS[mixer].facts.causal:
        with pytest.raises(MixerError, match=rf"{mixer} has no causal form, and attention here is causal"):
            replace_mixers(shared(name, 0.3), {pattern: spec})
        return
    if name not in DECODERS and MIXERS[mixer].facts.causal_only:
        with pytest.raises(MixerError, match=rf"{mixer} has only a causal form, and attention here sees both sides"):
            replace_mixers(shared(name, 0.3), {pattern: spec})
        return
    new, _ = replace_mixers(shared(name, 0.3), {pattern: spec}, seed=0)
    if mixer == "pooling" and name in IMAGES:
        with pytest.raises(
            MixerError, match="pools the cells of a grid and takes no tokens outside of it, got prefix=1"
        ):
            outputs(name, new)
        return
    outputs(name, new.train()).square().sum().backward()
    learning = [
        n for n, p in new.named_parameters() if "mixer" in n and p.grad is not None and torch.isfinite(p.grad).all()
    ]
    assert learning == [n for n, _ in new.named_parameters() if "mixer" in n]


def test_a_mixer_without_streaming_says_how_to_generate():
    names = [n for n, cls in MIXERS.items() if cls.facts.causal and not cls.facts.streaming]
    for mixer in names[:1]:
        new, _ = replace_mixers(make("gpt2"), {"name": mixer, **NEEDS.get(mixer, {})}, seed=0)
        ids = padded("left")[0]
        assert torch.isfinite(new(ids[:1]).logits).all()  # with a cache that nobody asked for
        with pytest.raises(MixerError, match="use_cache=False"):
            new.generate(ids[:1], max_new_tokens=3, pad_token_id=0)


@torch.no_grad()
def test_windows_of_the_host():
    model = make("mistral", sliding_window=4)
    new, _ = replace_mixers(model, "attention")
    ids = padded("left")[0][:1]
    assert (new(ids, use_cache=False).logits - model(ids).logits).abs().max() <= TIGHT
    with pytest.raises(MixerError, match="attends 4 tokens back"):
        new.generate(ids[:, :3], max_new_tokens=6, pad_token_id=0, do_sample=False)
    other, report = replace_mixers(model, "hydra", seed=0)
    assert "attention reached back 4 tokens" in str(report)
    assert torch.isfinite(other.generate(ids[:, :3], max_new_tokens=6, pad_token_id=0)).all()


@pytest.mark.parametrize("name", ["mistral", "embedding_gemma"])
@torch.no_grad()
def test_a_window_that_no_mask_tells_of(name):
    """As with flash attention, where masks are of padding alone, and in compiled code, which cannot look at a mask."""
    new, _ = replace_mixers(make(name, **({"sliding_window": 4} if name == "mistral" else {})), "attention")
    adapter = new.get_submodule("model" if name == "mistral" else "").layers[0].self_attn
    x, (_, mask), at = torch.randn(3, 9, 32), padded("right"), torch.arange(9)
    back = at[:, None] - at
    near = (back >= 0) & (back < 4) if name == "mistral" else back.abs() < 5
    whole = near & mask.bool()[:, None]
    wanted = adapter(x, whole[:, None], position_ids=at[None])[0]
    assert (adapter(x, mask, position_ids=at[None])[0] - wanted)[mask.bool()].abs().max() <= TIGHT
    assert (adapter(x, None, position_ids=at[None])[0] - wanted)[0].abs().max() <= TIGHT  # no padding there
    compiled = torch.compile(
        lambda *given: adapter(*given, position_ids=at[None])[0], backend="aot_eager", fullgraph=True
    )
    assert (compiled(x, whole[:, None]) - wanted)[mask.bool()].abs().max() <= TIGHT


@torch.no_grad()
def test_windows_of_some_layers():
    """Gemma 3 and ModernBERT attend a window in some layers, and turn queries and keys by another rule there."""
    model = make("gemma3", sliding_window=4)
    ids, mask = padded("left")
    new, _ = replace_mixers(model, "attention")
    assert (new(ids, attention_mask=mask, use_cache=False).logits - model(ids, attention_mask=mask).logits)[
        mask.bool()
    ].abs().max() <= TIGHT
    with pytest.raises(
        MixerError, match=r"layers.0.self_attn: the host attends 4 tokens back.* replace with local, window=4"
    ):
        new.generate(ids[:1], max_new_tokens=6, pad_token_id=0, do_sample=False)
    part, _ = replace_mixers(model, {"*.1.*": "attention"})
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    assert torch.equal(part.generate(ids, **how), model.generate(ids, **how))
    for name in ("gemma3", "modernbert"):
        mixed, report = replace_mixers(make(name), "hydra", seed=0)
        assert "attention reached back" in str(report)
        together, (ids, mask) = outputs(name, mixed, "right"), padded("right")
        assert (together[-5:] - final(mixed(ids[-1:, :5]))[0]).abs().max() <= TIGHT


@torch.no_grad()
def test_norms_of_queries_and_keys_go_along_or_are_named():
    new, report = replace_mixers(shared("qwen3"), {"*.0.*": "attention", "*.1.*": "hydra"}, seed=0)
    assert "queries and keys were normalised; hydra does not" in str(report)
    assert report.names("dropped") == [f"model.layers.1.self_attn.{part}_norm.weight" for part in "qk"]
    assert torch.equal(
        new.model.layers[0].self_attn.mixer.q_norm.weight, shared("qwen3").model.layers[0].self_attn.q_norm.weight
    )
    assert new.model.layers[0].self_attn.mixer.q_norm.eps == 1e-6
    vit = make("timm", qk_norm=True, norm_layer=nn.RMSNorm)  # which leaves eps to the dtype
    assert (outputs("timm", replace_mixers(vit, "attention")[0]) - outputs("timm", vit)).abs().max() <= TIGHT


@torch.no_grad()
def test_a_mask_of_pairs_is_honoured_or_refused():
    model = make("bert")
    ids, pairs = padded("left")[0][:1], torch.ones(1, 1, 9, 9, dtype=torch.bool)
    pairs[..., :4, 4:] = pairs[..., 4:, :4] = False
    new, _ = replace_mixers(model, "attention")
    assert (final(new(ids, attention_mask=pairs)) - final(model(ids, attention_mask=pairs))).abs().max() <= TIGHT
    hydra, _ = replace_mixers(model, "hydra", seed=0)
    whole = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    before = final(hydra(ids, attention_mask=whole))
    whole[..., :2] = False  # the same tensor, changed: it is read again
    assert not torch.equal(final(hydra(ids, attention_mask=whole)), before)
    with torch.inference_mode():
        assert torch.equal(final(hydra(ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))), before)
    with pytest.raises(
        MixerError, match=r"encoder.layer.0.attention: gets a mask of pairs.*hydra does not weigh pairs"
    ):
        hydra(ids, attention_mask=pairs)


@torch.no_grad()
def test_sequences_packed_into_one_row_are_kept_apart_or_refused():
    model, ids = shared("llama"), torch.randint(3, 60, (1, 9))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    new, _ = replace_mixers(model, "attention")
    together = final(new(ids, position_ids=packed, use_cache=False))  # transformers makes a mask of pairs of it
    assert (together - final(model(ids, position_ids=packed, use_cache=False))).abs().max() <= TIGHT
    assert (together[:, 4:] - final(new(ids[:, 4:], use_cache=False))).abs().max() <= TIGHT
    with pytest.raises(MixerError, match="gets a mask of pairs of tokens"):
        replace_mixers(model, "hydra", seed=0)[0](ids, position_ids=packed, use_cache=False)
    for mixed in (new, replace_mixers(model, "hydra", seed=0)[0]):
        with pytest.raises(
            MixerError, match=r"layers.0.self_attn: gets several sequences in one row.* give each a row of its own"
        ):
            mixed(ids, position_ids=packed, use_cache=True)  # then it makes none, nor does flash attention
        one = mixed.model.layers[1].self_attn
        assert torch.isfinite(one(torch.randn(1, 4, 32), None, position_ids=torch.tensor([[3, 4, 5, 9]]))[0]).all()


@pytest.mark.parametrize("spec", ["attention", "aft_simple"])
@torch.no_grad()
def test_a_prefix_that_sees_itself_whole_is_refused(spec):
    """Check that a causal mixer is refused where image tokens attend each other both ways.

    PaliGemma's and Gemma 3's do: a causal mixer would leave half of that out.
    """
    model, (ids, _) = shared("gemma"), padded("right")
    new, _ = replace_mixers(model, {"*.1.*": spec}, seed=0)
    order = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(3, 1, -1, -1).clone()
    if spec == "attention":
        wanted = final(model(ids, attention_mask=order, use_cache=False))
        assert (final(new(ids, attention_mask=order, use_cache=False)) - wanted).abs().max() <= TIGHT
    order[..., :4, :4] = True
    for cached in (False, True):
        with pytest.raises(
            MixerError,
            match=r"layers.1.self_attn: gets a mask in which tokens attend later ones.* Leave this module out",
        ):
            new(ids, attention_mask=order, use_cache=cached)


@torch.no_grad()
def test_grids_of_image_models_reach_mixers_of_grids():
    new, _ = replace_mixers(
        make("timm", dynamic_img_size=True), {"name": "aft_conv", "heads": 4, "kernel_size": 3}, seed=0
    )
    grids = []
    for m in new.modules():
        if type(m).__name__ == "AFTConv":
            m.register_forward_pre_hook(lambda m, args, kw: grids.append((kw["grid"], kw["prefix"])), with_kwargs=True)
    new(torch.randn(1, 3, 32, 32))
    new(torch.randn(1, 3, 48, 48))
    assert grids == [((4, 4), 1)] * 2 + [((6, 6), 1)] * 2


@torch.no_grad()
def test_detr_adds_positions_to_queries_and_keys_only():
    model = shared("detr")
    new, _ = replace_mixers(model, {"*": {"name": "hydra"}}, seed=0)
    adapter = new.encoder.layers[0].self_attn
    x, at = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    q, k, v = (adapter.mixer.get_submodule(p) for p in ("q_proj", "k_proj", "v_proj"))
    wanted = adapter.mixer.out_proj(functional.hydra(q(x + at), k(x + at), v(x), **adapter.mixer.maps))
    assert (adapter(x, position_embeddings=at)[0] - wanted).abs().max() <= TIGHT
    assert torch.isfinite(outputs("detr", replace_mixers(model, {"encoder.*": "pooling"})[0])).all()
