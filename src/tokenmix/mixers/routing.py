"""The routing layer (Roy et al. 2021, arXiv:2003.05997): attention inside the clusters of an online k-means."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..functional.routing import nearest_clusters, on_sphere, routing_chunk, top_tokens
from ..kernels.recompute import Passes, recomputing
from .base import About, Arguments, Mixer, register_state
from .cost import MixingCost
from .parts.aux_losses import add_aux_loss
from .parts.decisions import check_seed, decide, draw_directions, frozen, project_wide
from .parts.hands_out import ReadLinear
from .parts.options import at_least, check_heads, true_or_false
from .parts.shared import valid_mask


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
    """Routing attention: each token attends tokens of its own k-means cluster.

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

    supports_causal = supports_streaming = True
    about = About(
        "Roy et al. 2021, arXiv 2003.05997", "learned pattern", "T clusters D + T window D", "T (window heads + D)"
    )
    form = "routing"
    carries = ("v_proj", "out_proj")  # queries and keys are one projection
    waivers = {
        "token_before_reaches": "a token attends only those of its cluster",
        "past_reaches_present": "a token alone in its clusters attends itself only",
    }

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
        true_or_false(self, paper_form=paper_form)
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
        return frozen(self)

    @property
    def capabilities(self):
        """Return the features of this instance.

        The published causal form does not stream, as later tokens change earlier outputs.
        """
        can = super().capabilities
        return type(can)(**{**vars(can), "streaming": can.streaming and not self.paper_form})

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.routing`` for this input: (positional, keyword)."""
        args = project_wide(self, x), self.v_proj(x), self.centroids
        return args, {
            "heads": self.heads,
            "window": self.window,
            "paper_form": self.paper_form,
            "causal": self.causal,
            "key_mask": key_mask,
        }

    def mix(self, x: Tensor, context: Tensor | None, **given: Any) -> Tensor:
        (q, v, centroids), options = self.functional_args(x, context, **given)
        if self.training:
            centroids = self._passes.first(type(self).__name__, x, centroids.clone())
        valid = valid_mask(x, given["key_mask"])
        y = functional.routing(q, v, centroids, clusters=self._clusters(q, valid, centroids), **options)
        add_aux_loss("routing", lambda: self._commitment(q, valid, centroids))
        if self.training and not recomputing():
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
        (q, v, centroids), options = self.functional_args(x, key_mask=key_mask)
        valid = valid_mask(x, key_mask)
        now = self._clusters(q, valid, centroids)
        new = q.to(state.keys.dtype), v.to(state.values.dtype), now.transpose(1, 2).to(torch.int32), valid
        after = RoutingState(*(torch.cat(pair, 1) for pair in zip(state, new, strict=True)))
        if state.keys.shape[1] == 0:
            return self.out_proj(functional.routing(q, v, centroids, clusters=now, **options)), after
        clusters = after.clusters.long().transpose(1, 2)
        seen = after.keys.to(q.dtype), after.values.to(q.dtype), clusters, after.valid
        y = routing_chunk(q, *seen, heads=self.heads, window=self.window, count=self.clusters)
        return self.out_proj(y.to(v.dtype)), after
