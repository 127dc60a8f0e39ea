"""A convolutional stem for Vision Transformers, in place of one convolution of whole patches (Xiao et al. 2021, arXiv
2106.14881)."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import MixerError
from .layers import BatchNorm2d, init_linear

STEMS = ("patch", "conv")


def check_stem(who: str, stem: str, patch: int, dim: int) -> None:
    """Refuse an unknown stem, and sizes that a convolutional one cannot have."""
    if stem not in STEMS:
        raise MixerError(f"{who}: stem={stem!r} is unknown; choose {' or '.join(map(repr, STEMS))}.")
    if stem == "conv" and (patch < 2 or patch & (patch - 1) or dim % (patch // 2)):
        raise MixerError(
            f"{who}: stem='conv' halves the sides once for each factor 2 of patch and doubles the channels up to dim; "
            + f"patch must be 2, 4, 8, 16, ... and dim a multiple of patch / 2, got patch={patch} and dim={dim}."
        )


class ConvStem(nn.Module):
    """Map images to the grid of patches by log2(patch) convolutions of 3 x 3 and stride 2, and one of 1 x 1.

    Each of the former is followed by BatchNorm and relu; they have dim / 2^(n - 1), ..., dim / 2, dim channels. So a
    patch also reads pixels of its neighbours.

    Args:
        channels: of the images.
        dim: features of a patch.
        patch: side of a patch, a power of 2 from 2 on.
    """

    def __init__(self, channels: int, dim: int, patch: int):
        super().__init__()
        self.in_channels, self.kernel_size, self.stride = channels, (patch, patch), (patch, patch)
        steps = patch.bit_length() - 1
        widths = [channels, *(dim >> (steps - 1 - i) for i in range(steps))]
        layers: list[nn.Module] = []
        for before, width in zip(widths[:-1], widths[1:], strict=True):
            convolution = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
            layers += [convolution, BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.out = nn.Conv2d(dim, dim, 1)

    def reset_parameters(self, std: float) -> None:
        """Re-initialise: 3 x 3 weights from N(0, 2 / fan_out), those of the last layer from N(0, std), its biases 0."""
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.BatchNorm2d):
                layer.reset_parameters()
        init_linear(self.out, std)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, channels, H, W), sides multiples of ``patch``, to (B, dim, H / patch, W / patch)."""
        return self.out(self.layers(images))
