"""Build the mixer for one site: its options, its weights and its adapter."""

from __future__ import annotations

import copy
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...mixers import MIXERS, Mixer, build_mixer, is_softmax, mixer_options, required_options
from ...mixers.registration import load_mixer
from ...types import Options, Record, Spec
from ..conversion_report import Entry
from ..rotary import rotary_spec
from .adapters import HFAdapter, TimmAdapter, torch_adapter
from .families import Family
from .form_adapters import FormAdapter, T5Adapter, argument_names
from .sites import Site
from .weights import Weight, bias_table, carry, carry_table, dropped_entries, other_parameters, softmax_weights

MAX_PARAMETERS = 1 << 26
"""Parameters of a mixer beyond which its size is taken for a mistake, if attention has far fewer."""


def adapter_for(model: nn.Module, site: Site, spec: Spec, init: str) -> tuple[dict[int, nn.Module], list[Entry]]:
    """Return the replacement of each module, by ``id``, and the report on the tensors."""
    if site.obstacle is not None:
        raise MixerError(site.obstacle)
    module, family = model.get_submodule(site.name), site.traits
    found = softmax_weights(site, module)
    spec = spec_for_site(spec, site, module, found)
    mixer = _build_mixer(spec, site, found["v_proj.weight"].value)
    entries = carry(mixer, spec["name"], found, site) if init == "copy" else _all_new(mixer, found)
    if init == "copy" and (table := bias_table(model, site)) is not None:
        entries = carry_table(mixer, table, entries)
    parts = {path: module.get_submodule(path) for path in family.parts}
    kept = other_parameters(site, module) if init == "copy" else {}
    origin = {path: _without_weights(part, kept) for path, part in parts.items()}
    adapter: nn.Module
    if isinstance(module, nn.MultiheadAttention):
        adapter = torch_adapter(module, mixer, site, spec, origin)
    elif family.form is not None:
        made = T5Adapter if family.own else FormAdapter
        names = argument_names(parts[family.parts[0]])
        adapter = made(mixer, site, spec, origin, _residual_dropout(family, module), names)
        for path in family.own:
            if hasattr(module, path):
                adapter.add_module(path, getattr(module, path))
    else:
        kind = TimmAdapter if family.library == "timm" else HFAdapter
        adapter = kind(mixer, site, spec, origin, _residual_dropout(family, module))
    first, *others = family.parts
    news = {id(parts[first]): adapter.train(module.training)} | {id(parts[path]): nn.Identity() for path in others}
    place = f"{first}.mixer".lstrip(".")
    return news, [e if e.status == "dropped" else replace(e, name=f"{place}.{e.name}") for e in entries]


def _residual_dropout(family: Family, module: nn.Module) -> float:
    """Return the dropout rate that the module itself applies to its output; elsewhere the layer does that."""
    try:
        kept = attrgetter(family.dropout)(module)
    except AttributeError:
        kept = 0.0
    return float(getattr(kept, "p", 0.0) if isinstance(kept, nn.Module) else kept)


def _all_new(mixer: Mixer, found: dict[str, Weight]) -> list[Entry]:
    parameters = {n for n, _ in mixer.named_parameters()}
    return [
        Entry(n, "new", tuple(t.shape), None, n in parameters) for n, t in mixer.state_dict().items()
    ] + dropped_entries(found, set())


def spec_for_site(spec: Spec, site: Site, module: Any, found: dict[str, Weight]) -> Spec:
    """Fill in from the site the options that the mixer has and the spec leaves open."""
    name = spec["name"]
    if load_mixer(name) is None:
        build_mixer(**{**spec, "dim": site.dim})  # raises, naming the nearest mixer
    if "dim" in spec:
        raise MixerError(f"dim is the model's; leave it out of the spec {spec!r}")
    known = mixer_options(MIXERS[name])
    wanted: Options = {"heads": site.heads}
    if site.grid is not None:
        wanted["ndim"] = 2
    elif site.traits.library == "timm" and "ndim" in known and "ndim" not in spec:
        unknown = "mixes grids, and how the tokens of this model lie is unknown"
        raise MixerError(f"{name} {unknown}; ndim=1 in the spec mixes them as a sequence")
    bias = site.traits.bias(module) if site.beyond is not None and site.traits.bias is not None else None
    place = next((option for option in ("bias", "pair_bias") if option in known), None)
    if bias is not None and place is not None and not {place, "max_len"} & spec.keys():
        wanted[place] = bias
    if "max_len" in required_options(MIXERS[name], wanted | spec) and site.max_len is not None:
        wanted["max_len"] = site.max_len
    if not any(f"{part}.bias" in found for part in ("q_proj", "k_proj", "v_proj")):
        wanted["qkv_bias"] = False
    if "out_proj.bias" not in found:
        wanted["out_bias"] = False
    scale = site.scale or getattr(module, "scaling", None) or site.head_dim**-0.5
    if abs(scale * site.head_dim**0.5 - 1) > 1e-9:
        wanted["scale"] = scale
    if spec.get("heads", site.heads) == site.heads and site.kv_heads != site.heads:
        wanted["kv_heads"] = site.kv_heads
    if site.heads * site.head_dim != site.dim:
        wanted["head_dim"] = site.head_dim
    if site.qk_norm is not None:
        wanted |= {"qk_norm": site.qk_norm, "norm_eps": _eps(module.q_norm)}
    if is_softmax(spec):
        wanted |= site.traits.softmax(module)
        if site.beyond is not None and bias is None:
            keep = "keep this module, or give another mixer and train it"
            raise MixerError(f"attention here has {site.beyond}, which the mixer attention has not; {keep}")
    if is_softmax(spec) and site.rotary and "positions" not in wanted | spec:
        wanted["positions"] = rotary_spec(_rope(module), head_dim=site.head_dim, max_len=site.max_len)
    return {option: value for option, value in wanted.items() if option in known} | spec


def _rope(module: Any) -> Record:
    """Return the rotary parameters of this layer; Gemma 3 and ModernBERT have one set per kind of layer."""
    rules, kinds = module.config.rope_parameters, getattr(module.config, "layer_types", None)
    return rules.get(kinds[module.layer_idx], rules) if kinds else rules


def _eps(norm: Any) -> float:
    """Return the eps of a norm of torch, timm or transformers, which use two names.

    The eps of torch's ``RMSNorm`` may depend on the dtype.
    """
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return torch.finfo(norm.weight.dtype).eps if eps is None else float(eps)


def _build_mixer(spec: Spec, site: Site, like: torch.Tensor) -> Mixer:
    """Build the mixer on the site's device and in its dtype."""
    options = {"causal": site.causal, **spec}
    if site.traits.library != "torch" and bool(options["causal"]) != site.causal:
        is_so = "causal, and another mixer would read the future" if site.causal else "not causal"
        raise MixerError(f"attention here is {is_so}; leave causal={spec['causal']!r} out of the spec")
    if MIXERS[spec["name"]].facts.causal_only and not options["causal"]:
        raise MixerError(
            f"{spec['name']} has only a causal form, and attention here sees both sides; take another mixer"
        )
    if not MIXERS[spec["name"]].facts.causal:
        if options["causal"]:
            able = ", ".join(n for n, cls in MIXERS.items() if cls.facts.causal and cls.facts.streaming)
            raise MixerError(f"{spec['name']} has no causal form, and attention here is causal; these have one: {able}")
        options.pop("causal")
    with torch.device("meta"):
        probe = _try_build(options, site)
    if site.cross and not probe.facts.context:
        able = ", ".join(n for n, cls in MIXERS.items() if cls.facts.context)
        raise MixerError(
            f"{spec['name']} mixes a sequence with itself, and attention here attends another; these can: {able}"
        )
    many = sum(p.numel() for p in probe.parameters())
    if many > max(MAX_PARAMETERS, 16 * site.dim**2):
        much = f"{spec['name']} with max_len={options.get('max_len')} would have {many:,} parameters here"
        raise MixerError(f"{much}; give a smaller max_len, or a rank")
    with torch.device(like.device):
        return _try_build(options, site).to(like.dtype)


def _try_build(options: Options, site: Site) -> Mixer:
    known = mixer_options(MIXERS[options["name"]])
    return build_mixer(dim=site.dim, **{n: v for n, v in options.items() if n != "causal" or "causal" in known or v})


def _without_weights(module: nn.Module, kept: dict[str, nn.Parameter]) -> nn.Module:
    """Copy a module without the numbers of its weights; its buffers and ``kept`` stay, configs are shared."""
    real = {id(p) for p in kept.values()}
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
        if id(p) not in real
    }
    memo |= {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    return copy.deepcopy(module, memo)
