"""Routing attention (Roy et al. 2021, arXiv:2003.05997): attention within clusters of an online spherical k-means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.heads import by_head
from ..functional.layout.masks import valid_mask
from ..functional.sums.nonfinite import guard_nonfinite, propagate_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from ..kernels.recompute import Passes, is_recomputing
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.aux_losses import add_aux_loss
from ..mixers.parts.options import at_least, check_heads
from ..mixers.parts.weights_on_call import ReadLinear
from .parts.buckets import attend_dense, attend_sorted, bucket_codes, in_order, ratio, sort_by_bucket, sums_of
from .parts.decisions import check_seed, decide, draw_directions, freeze_decisions, project_wide

EPS = 1e-6  # added to the variance; a token of equal features is normalised to 0
TINY = 1e-12  # added to the squared length of a centroid


def on_sphere(q: Tensor, heads: int) -> Tensor:
    """Apply LayerNorm without affine in each head, the paper's proxy for the unit sphere, in float64.

    (B, T, D) -> (B, heads, T, e), of length sqrt(e).
    """
    x = by_head(q.double(), heads)
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def closeness(x: Tensor, centroids: Tensor) -> Tensor:
    """Compute x_t . mu_c / |mu_c|, detached: x (B, heads, T, e), centroids (heads, k, e) -> (B, heads, k, T)."""
    mu = centroids.detach().double()
    return (mu * (mu.square().sum(-1, keepdim=True) + TINY).rsqrt()) @ x.detach().transpose(-1, -2)


def nearest_clusters(q: Tensor, centroids: Tensor, *, heads: int) -> Tensor:
    """Return the cluster of each token, (B, heads, T)."""
    return closeness(on_sphere(q, heads), centroids).argmax(2)


def top_tokens(q: Tensor, centroids: Tensor, valid: Tensor, *, heads: int, window: int) -> Tensor:
    """Return the ``window`` valid tokens closest to each centroid, (B, heads, k, min(window, T)).

    Of two equally close tokens the earlier comes first; masked tokens come last.
    """
    close = torch.where(valid[:, None, None], closeness(on_sphere(q, heads), centroids), float("-inf"))
    if torch.compiler.is_exporting():  # ONNX has no stable sort; its TopK also takes the earlier of two equal values
        return close.topk(min(window, close.shape[-1]), -1).indices
    return close.sort(dim=-1, descending=True, stable=True).indices[..., :window]


@exact
@guard_nonfinite("q", "v")
def routing(
    q: Tensor,
    v: Tensor,
    centroids: Tensor,
    *,
    heads: int,
    window: int,
    paper_form: bool = False,
    clusters: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s(x_t . x_s / sqrt(e)) v_s over tokens routed like t.

    x is LayerNorm(q) in each head, queries and keys at once.
    ``causal``: a token belongs to the centroid nearest by angle, and attends itself and the valid tokens of its cluster
        before it, the last ``window`` in all.
    Otherwise, and with ``paper_form`` (Alg. 1): each centroid takes the ``window`` valid tokens nearest to it, and
        these attend each other, in order if ``causal``. A token that several take gets the mean of its outputs, one
        that none takes 0. This form looks ahead even if ``causal``: whether a centroid takes a token depends on later
        ones.

    Args:
        q: (B, T, D).
        v: (B, T, D).
        centroids: (heads, k, e).
        clusters: ``nearest_clusters`` (B, heads, T), or ``top_tokens`` (B, heads, k, w), to use instead of deciding.

    Masked queries, and those with nothing to attend, give 0.
    """
    choose("routing", backend, q)
    if q.shape[-1] % heads or centroids.shape[::2] != (heads, q.shape[-1] // heads):
        shape = tuple(centroids.shape)
        raise MixerError(f"routing: heads={heads} and centroids {shape} do not fit q of width {q.shape[-1]}.")
    valid = valid_mask(q, key_mask)
    xh, kh, vh = _prepare_heads(q, v, valid, heads)
    if paper_form or not causal:
        chosen = top_tokens(q, centroids, valid, heads=heads, window=window) if clusters is None else clusters
        y = _attend_clusters(xh, kh, vh, valid, chosen, causal=causal)
    else:
        chosen = nearest_clusters(q, centroids, heads=heads) if clusters is None else clusters
        there = valid[:, None].expand_as(chosen)
        order = sort_by_bucket(chosen, there, centroids.shape[1])
        codes = bucket_codes(chosen, order.rank, there, q.shape[1] + window)
        fit = {"size": window, "before": 1, "after": 0, "reach": window - 1}
        y = ratio(attend_sorted(xh, kh, vh, codes[:, :, None], order, causal=True, itself=True, **fit))
    return torch.where(valid[..., None], y.transpose(1, 2).flatten(2), 0.0).to(v.dtype)


@exact
def routing_chunk(
    q: Tensor, keys: Tensor, values: Tensor, clusters: Tensor, valid: Tensor, *, heads: int, window: int, count: int
) -> Tensor:
    """Compute the causal strict form for the last L tokens, q (B, L, D), over all S.

    keys (B, S, D) before LayerNorm, clusters (B, heads, S).
    """
    L = q.shape[1]
    there = valid[:, None].expand_as(clusters)
    codes = bucket_codes(clusters, sort_by_bucket(clusters, there, count).rank, there, keys.shape[1] + window)

    def form(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        xh, _, _ = _prepare_heads(q, q, valid[:, -L:], heads)
        _, kh, vh = _prepare_heads(keys, values, valid, heads)
        y = ratio(attend_dense(xh, kh, vh, codes[:, :, None], reach=window - 1, itself=True))
        return torch.where(valid[:, -L:, None], y.transpose(1, 2).flatten(2), 0.0)

    return propagate_nonfinite(form, q, keys, values, causal=True, key_mask=valid)


def _prepare_heads(q: Tensor, v: Tensor, valid: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries, keys and values per head, in float32 or better, with zeros at masked tokens."""
    q, v = (torch.where(valid[..., None], a, 0.0) for a in (q, v))
    x = on_sphere(q, heads).to(sum_dtype(q))
    return x * x.shape[-1] ** -0.5, x, by_head(v.to(x.dtype), heads)


def _attend_clusters(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, chosen: Tensor, *, causal: bool) -> Tensor:
    """Attend inside each centroid's tokens, chosen (B, H, k, w), and return to token order: (B, H, T, e)."""
    picked = valid[:, None, None].expand(*chosen.shape[:3], -1).gather(3, chosen)
    at = chosen.flatten(2)[..., None].expand(-1, -1, -1, q.shape[-1])
    qc, kc, vc = (a.gather(2, at).unflatten(2, chosen.shape[2:]) for a in (q, k, v))
    ok = in_order(chosen, chosen, causal=causal, itself=True) & picked[..., None, :]
    y = torch.where(picked[..., None], ratio(sums_of(qc, kc, vc, ok)), 0.0).flatten(2, 3)
    total = torch.zeros_like(v).scatter_add(2, at, y)
    taken = torch.zeros_like(v[..., :1]).scatter_add(2, at[..., :1], picked.flatten(2)[..., None].to(v.dtype))
    return total / taken.clamp_min(1.0)


@register_state
class RoutingState(NamedTuple):
    """Every token so far.

    keys (queries at once) and values (B, S, D); clusters (B, S, heads), the cluster in each head; valid (B, S) bool,
    True = may be attended.
    """

    keys: Tensor
    values: Tensor
    clusters: Tensor
    valid: Tensor


class Routing(Mixer):
    """Routing attention: each token attends to the tokens of its own k-means cluster.

    y_t = W_o [sum_s softmax_s(x_t . x_s / sqrt(e)) v_s] in each head, where x = LayerNorm(q), without affine
    parameters, serves as query and key. Roy et al. 2021, arXiv:2003.05997. Maps (B, T, D) to (B, T, D). In the causal
    form a token belongs to the centroid nearest by angle and attends the last ``window`` tokens of its cluster up to
    itself. In the bidirectional form each centroid takes the ``window`` tokens nearest to it, as published; a token
    that no centroid takes gives ``out_proj(0)``.

    Centroids are persistent buffers, not parameters. In train mode, and only there, each forward pass moves them
    towards the mean of the tokens nearest to them, over all rows of the batch: mu <- decay mu + (1 - decay) mean. This
    couples rows; masked tokens take no part, and ``extend`` moves nothing. The auxiliary loss "routing" is the mean of
    (x - mu)^2 between tokens and their centroids.

    Args:
        heads: number of heads, 8 by default; must divide dim. All of them route; the paper's models give half of the
            heads to local attention, which is the mixer ``local``.
        clusters: k, the number of centroids, 8 by default.
        window: w, the largest number of tokens that a query attends or a centroid takes, 16 by default.
        decay: of the moving average, from 0 to 1; 0.999 by default.
        seed: seed of the first centroids. None (default): they are drawn from torch's generator.
        paper_form: with causal=True, the published choice of tokens by centroids. This form LOOKS AHEAD: whether a
            centroid takes a token depends on later tokens. It does not stream. Default False; with causal=False this
            form is used anyway.

    Parameters: q_proj (queries and keys), v_proj, out_proj. Time O(T clusters D + T window D). The streaming state is
    the history of tokens.

    Deviations: the causal form is ours, unless ``paper_form``.

    Raises:
        MixerError: if an option is out of its range.
    """

    centroids: Tensor

    facts = Facts(
        causal=True,
        streaming=True,
        about=About(
            "Roy et al. 2021, arXiv 2003.05997", "learned pattern", "T clusters D + T window D", "T (window heads + D)"
        ),
        form=routing,
        carries=("v_proj", "out_proj"),  # queries and keys are one projection
        waivers={
            "token_before_reaches": "a token attends only those of its cluster",
            "past_reaches_present": "a token alone in its clusters attends itself only",
        },
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        clusters: int = 8,
        window: int = 16,
        decay: float = 0.999,
        seed: int | None = None,
        paper_form: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.clusters, self.window, self.decay, self.seed, self.paper_form = (
            heads,
            clusters,
            window,
            decay,
            seed,
            paper_form,
        )
        check_heads(self, heads)
        at_least(self, 1, clusters=clusters, window=window)
        check_seed(self, seed)
        if not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay <= 1:
            self.refuse(f"decay must be a number from 0 to 1, got {decay!r}")
        self.q_proj = ReadLinear(dim, dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        self.register_buffer("centroids", torch.empty(heads, clusters, dim // heads))
        self._decided: list[Tensor] | None = None
        self._passes = Passes()  # what they read, as each moves the centroids
        self.init_parameters()

    def init_parameters(self) -> None:
        """Draw the first centroids."""
        draw_directions(self.centroids, self.seed)

    def frozen(self):
        """Return a context in which tokens stay in the clusters of the first call."""
        return freeze_decisions(self)

    def narrow_capabilities(self, can):
        """Return the features of this instance.

        The published causal form does not stream, as later tokens change earlier outputs.
        """
        return replace(can, streaming=can.streaming and not self.paper_form)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``routing`` for this input: (positional, keyword)."""
        x = inputs.x
        args = project_wide(self, x), self.v_proj(x), self.centroids
        return args, {
            "heads": self.heads,
            "window": self.window,
            "paper_form": self.paper_form,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mix(self, inputs: Inputs) -> Tensor:
        x = inputs.x
        (q, v, centroids), options = self.functional_args(inputs)
        if self.training:
            centroids = self._passes.first(type(self).__name__, x, centroids.clone())
        valid = valid_mask(x, inputs.key_mask)
        y = routing(q, v, centroids, clusters=self._clusters(q, valid, centroids), **options)
        add_aux_loss("routing", lambda: self._commitment(q, valid, centroids))
        if self.training and not is_recomputing():
            self._move_centroids(q.detach(), valid)
        return self.out_proj(y)

    def _clusters(self, q: Tensor, valid: Tensor, centroids: Tensor) -> Tensor:
        if self.causal and not self.paper_form:
            return decide(self, lambda: nearest_clusters(q, centroids, heads=self.heads))
        return decide(self, lambda: top_tokens(q, centroids, valid, heads=self.heads, window=self.window))

    def _commitment(self, q: Tensor, valid: Tensor, centroids: Tensor) -> Tensor:
        """Compute the mean over valid tokens, heads and features of (x - mu)^2; mu is the token's nearest centroid."""
        x, near = (
            on_sphere(torch.where(valid[..., None], q, 0.0), self.heads),
            nearest_clusters(q, centroids, heads=self.heads),
        )
        mu = centroids.detach().double()[None].expand(len(x), -1, -1, -1).gather(2, near[..., None].expand_as(x))
        far = torch.where(valid[:, None, :, None], (x - mu).square(), 0.0)
        return (far.sum() / (valid.sum() * self.dim).clamp_min(1)).to(q.dtype)

    @torch.no_grad()
    def _move_centroids(self, q: Tensor, valid: Tensor) -> None:
        near = (
            nearest_clusters(q, self.centroids, heads=self.heads).transpose(0, 1).flatten(1)[..., None]
        )  # (heads, B T, 1)
        x = on_sphere(torch.where(valid[..., None], q, 0.0), self.heads).transpose(0, 1).flatten(1, 2)
        there = valid.flatten()[None, :, None].to(x.dtype).expand_as(near)
        old = self.centroids.double()
        count = torch.zeros_like(old[..., :1]).scatter_add(1, near, there)
        mean = torch.zeros_like(old).scatter_add(1, near.expand_as(x), x * there) / count.clamp_min(1.0)
        self.centroids.copy_(torch.where(count > 0, self.decay * old + (1 - self.decay) * mean, old))

    def mixing_cost(self, T: int) -> MixingCost:
        D, H, k, w = self.dim, self.heads, self.clusters, self.window
        strict = self.causal and not self.paper_form
        rows, keys = (T, 2 * w) if strict else (k * min(w, T), min(w, T))
        kept = 4 * D * (16 * T if strict else 9 * T + 4 * rows) + 10 * rows * H * keys
        return MixingCost(2 * T * k * D + 4 * rows * keys * D, None, kept, (8 * D + 4 * H + 1) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return (args[0].shape[-1] / options["heads"]) ** 0.5  # x has length sqrt(e)

    def empty_state(self, batch_size, *, device, dtype):
        if self.paper_form:
            self.refuse("paper_form=True looks ahead and cannot stream; build it with paper_form=False")
        keys = torch.zeros(batch_size, 0, self.dim, device=device, dtype=dtype)
        clusters = torch.zeros(batch_size, 0, self.heads, device=device, dtype=torch.int32)
        return RoutingState(keys, keys.clone(), clusters, torch.zeros(batch_size, 0, device=device, dtype=torch.bool))

    def mix_chunk(self, x, state, *, positions, key_mask):
        (q, v, centroids), options = self.functional_args(Inputs(x, key_mask=key_mask))
        valid = valid_mask(x, key_mask)
        now = self._clusters(q, valid, centroids)
        new = q.to(state.keys.dtype), v.to(state.values.dtype), now.transpose(1, 2).to(torch.int32), valid
        after = RoutingState(*(torch.cat(pair, 1) for pair in zip(state, new, strict=True)))
        if state.keys.shape[1] == 0:
            return self.out_proj(routing(q, v, centroids, clusters=now, **options)), after
        clusters = after.clusters.long().transpose(1, 2)
        seen = after.keys.to(q.dtype), after.values.to(q.dtype), clusters, after.valid
        y = routing_chunk(q, *seen, heads=self.heads, window=self.window, count=self.clusters)
        return self.out_proj(y.to(v.dtype)), after
