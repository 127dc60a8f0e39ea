"""What a decision is based on (the gradient form of Hydra Attention's Fig. 3), and which tokens memory slots read."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import Inputs
from ...models.effective_attention import EXACT
from .maps import Layer, check_vit, evaluate_without_gradients, grid_of, look_into, on_grid

FOCUSED = "only mixers such as AFT, Hydra and attention have a focus"


class Focus(NamedTuple):
    """What each token adds to the logit of a class, to first order.

    ``patches`` (B, H, W), ``prefix`` (B, prefix) and ``classes`` (B,).
    """

    patches: Tensor
    prefix: Tensor
    classes: Tensor


def focus(model: nn.Module, images: Tensor, classes: Tensor | None = None, *, layer: int = -1) -> Focus:
    """Compute score_t = sum_c g_c contribution_tc, the contribution of each token to a class's logit.

    It is the contribution of token t to the output of a layer's mixer, along the gradient g of the logit. Hydra (Bolya
    et al. 2022, Fig. 3): averages over hundreds of scalar heads are noise; so g is the gradient of the predicted class
    with regard to the class token's output of the last attention layer, and t contributes phi(q)_cls * phi(k)_t * v_t.
    The same rule holds wherever the output is linear in the values, so for AFT and softmax attention: a_cls,t v_t with
    their own weights. The score is v_t . d logit / d v_t with the weights held fixed, which is that sum. The mean over
    patches instead of a class token, and earlier layers, take every output's gradient; that reading is ours. The
    paper's scale is unknown; these scores have none of their own: over all tokens they sum to g . y.

    Args:
        classes: (B,) whose logits; default: the predicted ones.
        layer: which layer, counted as Python does.

    Raises:
        MixerError: the model has no head, or the layer's mixer is not a sum over values (External, Fourier, MLP-Mixer
            ...).
    """
    model = check_vit(model, "focus")
    if model.head is None:
        raise MixerError("focus: the model has no head, so no class to explain; build it with classes > 0.")
    if not -len(model.blocks) <= layer < len(model.blocks):
        raise MixerError(f"focus: layer must be one of the model's {len(model.blocks)}, got {layer}.")
    seen = look_into(model, images)[layer]
    g, classes = _gradient(model, images, seen.mixer, classes)
    with evaluate_without_gradients(model), torch.enable_grad():
        score = _value_contributions(seen, g)
    prefix = model.config.prefix
    return Focus(score[:, prefix:].unflatten(1, grid_of(model, images)), score[:, :prefix], classes)


def _gradient(model: nn.Module, images: Tensor, mixer: nn.Module, classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradient (B, T, D) of each image's class logit with regard to a mixer's output, and the classes."""
    outputs: list[Tensor] = []

    def cut(_: nn.Module, args: tuple, y: Tensor) -> Tensor:
        outputs.append(y.detach().requires_grad_())
        return outputs[-1]

    hook = mixer.register_forward_hook(cut)
    try:
        with evaluate_without_gradients(model), torch.enable_grad():
            logits = model(images)
    finally:
        hook.remove()
    classes = logits.argmax(-1) if classes is None else classes
    if classes.shape != logits.shape[:1] or bool((classes < 0).any() or (classes >= logits.shape[1]).any()):
        known = f"0..{logits.shape[1] - 1}"
        raise MixerError(
            f"focus: classes must be one of {known} for each of {len(logits)} images, got {classes.tolist()}."
        )
    (g,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), outputs[0])
    return g, classes


def _value_contributions(seen: Layer, g: Tensor) -> Tensor:
    """Compute v_t . d (g . y) / d v_t with fixed weights, (B, T); refuse mixers for which that is not all of the
    output.
    """
    mixer, x, given = seen
    form = mixer.facts.functional_form()
    names = [] if form is None else list(inspect.signature(form).parameters)
    if "v" not in names:
        raise MixerError(f"focus: the output of {type(mixer).__name__} is not a sum over values; {FOCUSED}.")
    full = {"positions": None, "key_mask": None, "attn_mask": None, "grid": None, "prefix": 0, **given}
    args, options = mixer.functional_args(Inputs(x, None, **full))
    at = names.index("v")
    fixed = [a.detach() if isinstance(a, Tensor) else a for a in args]
    fixed[at] = v = fixed[at].requires_grad_()
    whole = mixer.out_proj(form(*fixed, **options))
    along = ((whole - mixer.out_proj(torch.zeros_like(v))) * g).flatten(1).sum(1)
    (toward,) = torch.autograd.grad(along.sum(), v)
    score = (toward * v).sum(-1).detach()
    is_all = torch.allclose(whole, mixer(x, **given), rtol=EXACT, atol=EXACT * float(whole.detach().abs().max()))
    if (
        not is_all
        or v.shape[1] != x.shape[1]
        or bool(((score.sum(1) - along).abs() > EXACT * score.abs().sum(1).clamp_min(1e-30)).any())
    ):
        raise MixerError(f"focus: the output of {type(mixer).__name__} is not linear in its values; {FOCUSED}.")
    return score


def slot_reads(model: nn.Module, images: Tensor) -> dict[int, Tensor]:
    """Compute which tokens each memory slot reads, by layer, as maps (B, heads, slots, H, W).

    They are the weights of External attention after the layer's own normalisation.
    """
    model, found = check_vit(model, "slot_reads"), {}
    for i, (mixer, x, _) in enumerate(look_into(model, images)):
        if has_slots(mixer):
            with torch.no_grad():
                w = mixer.slot_weights(x)
            maps = on_grid(w.flatten(2), grid_of(model, images), model.config.prefix)
            found[i] = maps.unflatten(1, w.shape[2:])
    if not found:
        kinds = ", ".join(sorted({type(block.mixer).__name__ for block in model.blocks}))
        raise MixerError(
            f"slot_reads: no layer has an external memory ({kinds}); external and external_multihead have."
        )
    return found


def has_slots(mixer: object) -> bool:
    """Return whether tokens read a memory of slots: the mixer has ``slot_weights(x)`` and ``slot_values()``."""
    return callable(getattr(mixer, "slot_weights", None))


def slot_similarity(mixer: Any) -> Tensor:
    """Compute the cosine similarity (slots, slots) of the directions that slots write, the rows of M_v."""
    rows = F.normalize(mixer.slot_values().detach().double(), dim=1)
    return rows @ rows.mT
