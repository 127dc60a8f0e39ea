"""A diffusion transformer around any bidirectional mixer (DiT, Peebles & Xie 2023, arXiv 2212.09748).

It predicts the velocity of a rectified flow (``models/flow.py``) from a noised image, the time and the class. Shapes: B
images, N patches, D features per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..positions.grid import sincos
from ..positions.sinusoidal import SinusoidalPositions
from ..system.config import Json
from ..types import Options, Spec
from .blocks import Block, cycle_specs, evaluation_mode
from .flow import Solver, check_solver, guide_velocity, solve_flow
from .images import check_images, check_layers, check_multiples, held_size, image_block, normalise_image_config
from .layers import init_linear
from .mae import images_of
from .model import Model
from .sampling import seeded_generator

POSITIONS = ("sinusoidal", "learned", None)
WAVES, TIME_SCALE = 256, 1000.0
"""Features of the time before its MLP, and the factor on times in [0, 1]; DiT's times are 0 to 999."""


@dataclass(frozen=True)
class DiTConfig(Json):
    """A diffusion transformer as JSON.

    Args:
        dim: features per token, at least 1; a multiple of 4 for sinusoidal positions.
        layers: number of blocks, at least 1.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``. ``max_len``, ``ndim`` and
            ``grid_size`` are filled in.
        image_size: [height, width] in pixels, multiples of ``patch``; images have this size.
        patch: side of a patch in pixels, at least 1.
        channels: channels of the images, at least 1.
        classes: classes that condition the model; 0: it is told none.
        class_dropout: probability in [0, 1) that training hides the class of an image, which guidance needs; without
            classes it has no effect.
        mlp_ratio: hidden width of the MLPs as a multiple of ``dim``.
        positions: what is added to the patches: "sinusoidal" vectors in two dimensions, "learned" ones, or None.
        dropout: dropout rate in [0, 1) of the output of each branch.
        drop_path: drop path rate of the last layer, in [0, 1); it rises linearly from 0 in the first layer.
    """

    dim: int
    layers: int
    mixers: tuple[Spec, ...]
    image_size: tuple[int, ...] = (32, 32)
    patch: int = 2
    channels: int = 3
    classes: int = 0
    class_dropout: float = 0.1
    mlp_ratio: float = 4.0
    positions: str | None = "sinusoidal"
    dropout: float = 0.0
    drop_path: float = 0.0
    kind: ClassVar[str] = "dit"
    norm_eps: ClassVar[float] = 1e-6
    init_std: ClassVar[float] = 0.02

    def __post_init__(self) -> None:
        normalise_image_config(self, "dim", "layers", "patch", "channels")
        check_layers(self)
        if self.positions not in POSITIONS:
            raise MixerError(
                f"DiTConfig: positions={self.positions!r} is unknown; choose 'sinusoidal', 'learned' or null."
            )
        if self.positions == "sinusoidal" and self.dim % 4:
            raise MixerError(f"DiTConfig: dim must be a multiple of 4 for sinusoidal positions, got {self.dim}.")
        if not 0 <= self.class_dropout < 1:
            raise MixerError(f"DiTConfig: class_dropout must be in [0, 1), got {self.class_dropout}.")
        check_multiples(self, self.patch, f"patch={self.patch}")

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of patches."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        return cycle_specs(self.mixers, self.layers)


class DiTBlock(Block):
    """One layer with adaLN-Zero: a condition c shifts and scales the inputs of both branches and gates their outputs.

    x + g_1 * mixer(n(x) (1 + s_1) + b_1), then x + g_2 * mlp(n(x) (1 + s_2) + b_2), where n is a LayerNorm without
    weights and (b_1, s_1, g_1, b_2, s_2, g_2) = W silu(c). W begins as 0, so that the block begins as the identity.

    Args:
        dim: features per token, D.
        spec: the mixer as JSON.
        options: those of ``Block``.
    """

    def __init__(self, dim: int, spec: Spec, **options: Any):
        super().__init__(dim, spec, **options)
        if self.mlp is None:
            raise MixerError("DiTBlock: mlp_ratio must be above 0, because the condition also steers the MLP.")
        self.mixer_norm, self.mlp_norm = (plain_norm(dim, options["norm_eps"]) for _ in range(2))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(  # type: ignore[override]  # its context is a condition of the whole row
        self, x: Tensor, condition: Tensor, **given: object
    ) -> Tensor:
        """Map (B, N, D) to the same shape, given silu(c) as ``condition`` (B, D); ``given`` goes to the mixer."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, -1)
        mixed = self.mixer(modulate(self.mixer_norm(x), shift, scale), **self.for_mixer(given))
        x = x + gate * self.dropout(mixed)
        assert self.mlp is not None
        assert self.mlp_norm is not None  # both refused at construction
        return x + mlp_gate * self.dropout(self.mlp(modulate(self.mlp_norm(x), mlp_shift, mlp_scale)))

    def reset_parameters(self, std: float = 0.02, residual_std: float | None = None) -> None:
        """Re-initialise as ``Block`` does, and the modulation as 0."""
        super().reset_parameters(std, residual_std)
        init_linear(self.modulation, 0.0)


class Condition(nn.Module):
    """The condition c = MLP(waves of the time) + embedding of the class, (B, D).

    The waves are 256 sines and cosines of 1000 t. Class number ``classes`` stands for no class.
    """

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.waves = SinusoidalPositions(WAVES, scale=1.0)
        self.up, self.down = nn.Linear(WAVES, dim), nn.Linear(dim, dim)
        self.label = nn.Embedding(classes + 1, dim) if classes else None

    def reset_parameters(self, std: float) -> None:
        """Draw the weights from N(0, std); biases are 0."""
        init_linear(self.up, std)
        init_linear(self.down, std)
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=std)

    def forward(self, time: Tensor, classes: Tensor) -> Tensor:
        """Map times (B,) and classes (B,) to (B, D)."""
        c = self.down(F.silu(self.up(self.waves(TIME_SCALE * time).to(self.up.weight.dtype))))
        return c if self.label is None else c + self.label(classes)


class Head(nn.Module):
    """A norm, shifted and scaled by the condition, and a linear map to the numbers of a patch; both begin as 0."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm = plain_norm(config.dim, config.norm_eps)
        self.modulation = nn.Linear(config.dim, 2 * config.dim)
        self.out = nn.Linear(config.dim, config.channels * config.patch**2)

    def reset_parameters(self) -> None:
        """Set every parameter to 0."""
        init_linear(self.modulation, 0.0)
        init_linear(self.out, 0.0)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map (B, N, D) to patches (B, N, P)."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        return self.out(modulate(self.norm(x), shift, scale))


class DiT(Model):
    """Patches, positions, blocks that a time and a class condition, and a map back to the image.

    Blocks and head begin as 0, so a new model predicts a velocity of 0.

    Args:
        config: a ``DiTConfig``.
    """

    config_class = DiTConfig
    pipeline_tags = "unconditional-image-generation", "unconditional-image-generation"

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        sizes: Options = {"dim": config.dim, "mlp_ratio": config.mlp_ratio, "grid": config.grid}
        with torch.random.fork_rng():  # as in ViT: only reset_parameters below may draw
            self.patch = nn.Conv2d(config.channels, config.dim, config.patch, stride=config.patch)
            tokens = prod(config.grid)
            self.positions = nn.Parameter(torch.empty(tokens, config.dim)) if config.positions == "learned" else None
            self.condition = Condition(config.dim, config.classes)
            self.blocks: Any = nn.ModuleList(
                image_block(config, i, cls=DiTBlock, tokens=tokens, **sizes) for i in range(config.layers)
            )
            self.head = Head(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator.

        Weights are drawn from N(0, init_std), those of the patches from Xavier's uniform distribution, as in DiT's
        code; biases, modulations and the last layer are 0.
        """
        std = self.config.init_std
        nn.init.xavier_uniform_(self.patch.weight.detach().flatten(1))
        nn.init.zeros_(self.patch.bias)  # type: ignore[arg-type]  # it has one
        if self.positions is not None:
            nn.init.normal_(self.positions, std=std)
        self.condition.reset_parameters(std)
        for block in self.blocks:
            block.reset_parameters(std)
        self.head.reset_parameters()

    def forward(self, images: Tensor, time: Tensor, classes: Tensor | None = None) -> Tensor:
        """Predict the velocity (B, C, H, W) at noised images.

        Args:
            images: (B, C, H, W), x_t.
            time: (B,) floating point, t in [0, 1].
            classes: (B,) integers; ``config.classes`` stands for none. None: no image has one.

        Raises:
            MixerError: for images of another size, times of another shape, and classes that do not exist.
        """
        self._check(images, time)
        classes = self.as_classes(classes, len(images))
        x = self.patch(held_size(images, "DiT")).flatten(2).transpose(1, 2)
        table = self._table(x)
        x = x if table is None else x + table
        condition = F.silu(self.condition(time, classes))
        for block in self.blocks:
            x = block(x, condition, grid=self.config.grid, prefix=0)
        return images_of(self.head(x, condition), self.config.patch, (images.shape[2], images.shape[3]))

    def _table(self, x: Tensor) -> Tensor | None:
        if self.config.positions != "sinusoidal":
            return self.positions
        return sincos(self.config.grid, self.config.dim, device=x.device).to(x.dtype)

    def _check(self, images: Tensor, time: Tensor) -> None:
        check_images("DiT", images, self.config.channels)
        if tuple(images.shape[2:]) != self.config.image_size:
            built, got = (" x ".join(map(str, size)) for size in (self.config.image_size, images.shape[2:]))
            raise MixerError(f"DiT: this model is for images of {built}, got {got}; resize the images.")
        if time.shape != images.shape[:1] or not time.is_floating_point():
            raise MixerError(
                f"DiT: time must be floating point of shape ({len(images)},), one for each image, got {time.dtype} "
                + f"{tuple(time.shape)}."
            )

    def as_classes(self, classes: Tensor | None, n: int) -> Tensor:
        """Return the classes of n images, (n,) int64; raise an error for an unknown class."""
        none = self.config.classes
        if classes is None:
            return torch.full((n,), none, device=self.patch.weight.device)
        if classes.shape != (n,) or classes.is_floating_point() or classes.dtype == torch.bool:
            raise MixerError(
                f"DiT: classes must be integers of shape ({n},), one for each image, got {classes.dtype} "
                + f"{tuple(classes.shape)}."
            )
        if classes.device.type == "cpu" and n and not torch.compiler.is_compiling():
            low, high = int(classes.min()), int(classes.max())
            if not 0 <= low <= high <= none:
                raise MixerError(f"DiT: classes must be in 0..{none} ({none}: none), got {low} to {high}.")
        return classes.long()

    def guided_velocity(self, images: Tensor, time: Tensor, classes: Tensor, guidance: float) -> Tensor:
        """Predict the velocity with classifier-free guidance of weight ``guidance``; 1: without guidance."""
        if guidance == 1:
            return self(images, time, classes)
        none = torch.full_like(classes, self.config.classes)
        both = self(torch.cat([images, images]), torch.cat([time, time]), torch.cat([classes, none]))
        with_class, without = both.chunk(2)
        return guide_velocity(with_class, without, guidance)

    def check_guidance(self, guidance: float) -> None:
        """Refuse guidance where the model has no classes, or has never been without one in training."""
        if guidance == 1:
            return
        if not self.config.classes or not self.config.class_dropout:
            why = "model.class_dropout=0" if self.config.classes else "model.classes=0"
            raise MixerError(
                f"DiT: guidance={guidance} needs a model trained with classes that are sometimes hidden, but this one "
                + f"has {why}; leave guidance at 1."
            )

    @torch.no_grad()
    def sample(
        self,
        n: int,
        classes: Tensor | None = None,
        *,
        steps: int = 50,
        solver: Solver = "heun",
        guidance: float = 1.0,
        seed: int | None = None,
    ) -> Tensor:
        """Sample n images, normalised as those of training, (n, C, H, W), by ``flow.solve_flow`` from noise.

        The noise is drawn on the CPU, so a seed gives the same noise on any device; nothing else is random.

        Args:
            classes: (n,) integers; None: no image has one.
            steps: steps of the solver, at least 1.
            solver: "euler" or "heun".
            guidance: weight of classifier-free guidance; 1: none.
            seed: seed of the noise; None: other images each time.

        Raises:
            MixerError: for n below 0 and bad steps, classes or guidance.
        """
        if not isinstance(n, int) or n < 0:
            raise MixerError(f"DiT: n must be an integer >= 0, got {n!r}.")
        check_solver(steps, solver)
        self.check_guidance(guidance)
        device = self.patch.weight.device
        known = self.as_classes(classes, n).to(device)
        generator = seeded_generator(seed)
        shape = n, self.config.channels, *self.config.image_size
        noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(self.patch.weight)
        with evaluation_mode(self):
            return solve_flow(
                lambda x, t: self.guided_velocity(x, t, known, guidance), noise, steps=steps, solver=solver
            )


def plain_norm(dim: int, eps: float) -> nn.LayerNorm:
    """Build a LayerNorm without weights, which the modulation replaces."""
    return nn.LayerNorm(dim, eps=eps, elementwise_affine=False)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x (1 + scale) + shift."""
    return x * (1 + scale) + shift
