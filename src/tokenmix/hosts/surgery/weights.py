"""Map the projections of a host's attention to our names, into a mixer and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import MIXERS, Mixer
from ...mixers.facts import QKVO
from ...positions import T5Bias
from ..conversion_report import Entry
from .sites import Site

NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Slot:
    """Locate a projection's weight and bias within a site.

    Args:
        index, sizes: the part is number ``index`` of a fused tensor with parts of these many rows; (): not fused.
        heads: more than 1: fused per head, as in GPT-NeoX; ``sizes`` are then those of one head.
        transposed: as in GPT-2's Conv1D.
        shift: our numbers minus the host's: 1 for Gemma 3's norms, which multiply by 1 + weight.
    """

    weight: str
    bias: str
    index: int = 0
    sizes: tuple[int, ...] = ()
    heads: int = 1
    transposed: bool = False
    shift: float = 0.0

    def tensor(self, leaf: str) -> str:
        """Return the name of the weight or the bias."""
        return self.weight if leaf == "weight" else self.bias

    def part(self, whole: Tensor) -> Tensor:
        """Return a view of this part of the host's tensor: (heads, rows of one head), and columns for a weight."""
        rows = whole.T if self.transposed and whole.ndim == 2 else whole
        by_head = rows.unflatten(0, (self.heads, -1))
        return by_head.split(self.sizes, 1)[self.index] if self.sizes else by_head


@dataclass(frozen=True)
class Weight:
    """Hold one of our tensors as the host has it: its value, its name there, and whether it is part of a larger one."""

    value: Tensor
    origin: str
    split: bool


def slots(site: Site, module: nn.Module) -> dict[str, Slot]:
    """Return where a site has q_proj, k_proj, v_proj, out_proj, and q_norm and k_norm if there are any."""
    family = site.traits
    names = family.context_weights if site.cross and family.context_weights is not None else family.weights
    keys = site.head_dim if family.by_head else site.kv_heads * site.head_dim
    rows = (site.head_dim if family.by_head else site.heads * site.head_dim, keys, keys)
    found = {}
    for i, (part, name) in enumerate(zip(QKVO, names, strict=True)):
        together = [j for j, other in enumerate(names) if other == name]
        fused = len(together) > 1
        found[part] = Slot(
            name,
            _bias(name),
            index=together.index(i),
            sizes=tuple(rows[j] for j in together) if fused else (),
            heads=site.heads if fused and family.by_head else 1,
            transposed=family.transposed,
        )
    if site.qk_norm is not None:
        shift = float(type(module).__name__.startswith(family.one_plus))
        found |= {part: Slot(f"{part}.weight", f"{part}.bias", shift=shift) for part in NORMS}
    return found


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def softmax_weights(site: Site, module: nn.Module) -> dict[str, Weight]:
    """Return the site's tensors under our names: "q_proj.weight" (out, in), "q_proj.bias" ..."""
    state, found = module.state_dict(), {}
    for part, slot in slots(site, module).items():
        for leaf in ("weight", "bias"):
            name = slot.tensor(leaf)
            if name in state:
                value = slot.part(state[name]).flatten(0, 1)
                found[f"{part}.{leaf}"] = Weight(value + slot.shift if slot.shift else value, name, bool(slot.sizes))
    return found


@torch.no_grad()
def carry(mixer: Mixer, name: str, found: dict[str, Weight], site: Site) -> list[Entry]:
    """Fill the tensors that the mixer called ``name`` takes over.

    Returns:
        What became of each of its tensors, and the tensors of the host that it does not use.
    """
    cls = MIXERS[name]
    entries, used, taken = [], set(), cls.facts.carries
    parameters = {n for n, _ in mixer.named_parameters()}
    for ours, tensor in mixer.state_dict().items():
        part, _, leaf = ours.rpartition(".")
        part = cls.facts.copies.get(part, part)
        source = found.get(f"{part}.{leaf}") if part in taken else None
        if source is not None:
            tensor.copy_(_fit_tensor(source, tensor, ours, part, site))
            used.add(f"{part}.{leaf}")
        elif part in taken and leaf == "bias":  # the host has none, and adding zero is the same function
            tensor.zero_()
        status = "new" if source is None else "split" if source.split else "copied"
        entries.append(
            Entry(ours, status, tuple(tensor.shape), None if source is None else source.origin, ours in parameters)
        )
    return entries + dropped_entries(found, used)


def dropped_entries(found: dict[str, Weight], used: set[str]) -> list[Entry]:
    """Return entries for the host's tensors that nothing took over; a part of a larger tensor is named with it."""
    return [
        Entry(f"{w.origin} ({ours})" if w.split else w.origin, "dropped", tuple(w.value.shape), w.origin)
        for ours, w in found.items()
        if ours not in used
    ]


def _fit_tensor(source: Weight, tensor: Tensor, ours: str, part: str, site: Site) -> Tensor:
    """Return the host's tensor in the shape of ours; grouped keys and values are repeated for each query head."""
    value = source.value
    if part in ("k_proj", "v_proj") and site.kv_heads != site.heads and len(tensor) == site.heads * site.head_dim:
        value = value.unflatten(0, (site.kv_heads, -1)).repeat_interleave(site.heads // site.kv_heads, 0).flatten(0, 1)
    if value.shape != tensor.shape:
        shapes = f"{source.origin} has the shape {tuple(source.value.shape)}, {ours} of the mixer {tuple(tensor.shape)}"
        raise MixerError(f"{shapes}; they cannot be mapped")
    return value


def other_parameters(site: Site, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a site that are no projection or norm and do not stay: those of ``Site.beyond``."""
    family = site.traits
    used = {slot.tensor(leaf) for slot in slots(site, module).values() for leaf in ("weight", "bias")}
    stay = tuple(f"{path}." for path in family.own)
    return {n: p for n, p in module.named_parameters() if n not in used and not n.startswith(stay)}


def bias_table(model: nn.Module, site: Site) -> Tensor | None:
    """Return the table (buckets, heads) of the bias that a stack of T5 adds to its logits; None for other models."""
    if site.beyond is None or site.traits.bias is None:
        return None
    stack = model.get_submodule(site.name.partition("block.")[0].rstrip("."))
    found = (module for name, module in stack.named_modules() if name.endswith("relative_attention_bias"))
    return next((module.weight for module in found if isinstance(module, nn.Embedding)), None)


@torch.no_grad()
def carry_table(mixer: Mixer, table: Tensor, entries: list[Entry]) -> list[Entry]:
    """Fill the mixer's own tables of the same bias; one for all heads gets their mean, and counts as new."""
    copied = set()
    for name, part in mixer.named_modules():
        if isinstance(part, T5Bias) and part.buckets == len(table):
            alike = part.table.shape == table.shape
            part.table.copy_(table if alike else table.mean(1, keepdim=True))
            copied |= {f"{name}.table"} if alike else set()
    return [replace(e, status="copied", origin="relative_attention_bias") if e.name in copied else e for e in entries]


@torch.no_grad()
def write_back(mixer: Mixer, site: Site, module: nn.Module) -> list[Entry]:
    """Fill a host's softmax attention from a mixer that has its four projections."""
    ours, entries, done = mixer.state_dict(), [], set()
    state = module.state_dict()
    for part, slot in slots(site, module).items():
        for leaf in ("weight", "bias"):
            name, source = slot.tensor(leaf), ours.get(f"{part}.{leaf}")
            if name not in state:
                continue
            target = slot.part(state[name])
            target.copy_(
                torch.zeros_like(target)
                if source is None
                else _average_groups(source, target, f"{part}.{leaf}", site) - slot.shift
            )
            if name not in done:
                entries.append(
                    Entry(name, "new" if source is None else "copied", tuple(state[name].shape), f"{part}.{leaf}")
                )
                done.add(name)
    kept = {
        f"{part}.{leaf}"
        for part, slot in slots(site, module).items()
        for leaf in ("weight", "bias")
        if slot.tensor(leaf) in state
    }
    return entries + [Entry(n, "dropped", tuple(t.shape), n) for n, t in ours.items() if n not in kept]


def _average_groups(source: Tensor, target: Tensor, name: str, site: Site) -> Tensor:
    """Reduce repeated keys and values to the mean of each group (Ainslie et al. 2023, arXiv 2305.13245, Sec. 2.1)."""
    if (
        name.startswith(("k_proj", "v_proj"))
        and site.kv_heads != site.heads
        and len(source) == site.heads * site.head_dim
    ):
        source = source.unflatten(0, (site.kv_heads, site.heads // site.kv_heads, -1)).mean(1).flatten(0, 1)
    wanted = target.flatten(0, 1).shape
    if source.shape != wanted:
        shapes = f"{name} of the mixer has the shape {tuple(source.shape)}, the host needs {tuple(wanted)}"
        raise MixerError(f"{shapes}; they cannot be mapped")
    return source.view_as(target)
