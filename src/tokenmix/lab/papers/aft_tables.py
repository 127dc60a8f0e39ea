"""The trained tables of An Attention Free Transformer, whose printed numbers stand in its recipes."""

from __future__ import annotations

from .claim import NOT_YET, TOO_LARGE, Claim, Number, Trial
from .rows import of_recipe, trained

SECOND_HAND = "second-hand"
BOTH = ", train / test"
GIVE = "the printed rows give {}, which is no test of ours"
SMALL = "vision.md#cifar-10-at-equal-cost"
TRAIN = "tokenmix train {} --out runs/{} --row {}"


def trained_claims() -> tuple[Claim, ...]:
    """Return the claims that need training, table by table."""
    return (*density(), *text(), *images(), *appendix())


def density() -> tuple[Claim, ...]:
    """Return the claims about CIFAR-10."""
    name = "aft_cifar10_density"
    quality, cost = ("train", "test"), ("iterations_per_s", "gb_per_gpu")
    others = {
        "PixelCNN, train / test": "3.08 / 3.14",
        "PixelCNN++, test": "2.92",
        "PixelSNAIL, test": "2.85",
    }
    single = {"sparse strided 128x256, test": "2.80", "image transformer 12x512, test": "2.90"}
    return (
        Claim(
            "Table 2",
            "On CIFAR-10, sub-pixel by sub-pixel, AFT-local of window 256 reaches fewer bits per dimension than "
            "Transformers of its size, and AFT-simple comes near them.",
            (
                *trained(others, "bits/dim", built=False),
                *trained(single, "bits/dim"),
                *of_recipe(name, "table2/", quality, "bits/dim", "{:.2f}", BOTH),
            ),
            code="lab.recipes.aft_cifar10_density",
            command=TRAIN.format(name, "density", "table2/aft_local_256_24x256") + " --train.steps 200",
            small="density.md#measured",
            trials=(
                Trial("cifar10_density", "aft_local", "better", "attention"),
                Trial("cifar10_density", "aft_local", "better", "image_transformer"),
                Trial("cifar10_density", "aft_local", "better", "strided"),
                Trial("cifar10_density", "aft_simple", "worse", "attention"),
            ),
        ),
        Claim(
            "Table 2, speed and memory",
            "AFT trains faster than the Transformers and in less than half of their memory (batch 32, 8 V100).",
            of_recipe(name, "table2/", cost, "it/s, GB", "{:.4g}", without=NOT_YET),
            code="models.image_density.ImageDensity",
        ),
        Claim(
            "Table 3",
            "Factors of the bias train better than a bias for each pair, on training and test images.",
            of_recipe(name, "table3/", quality, "bits/dim", "{:.2f}", BOTH),
            code="mixers.aft.AFTLocal",
            command=TRAIN.format(name, "factors", "table3/factors") + " --train.steps 200",
            small="density.md#measured",
            trials=(Trial("cifar10_density", "aft_local", "better", "aft_local, plain bias"),),
        ),
    )


def text() -> tuple[Claim, ...]:
    """Return the claims about enwik8."""
    name = "aft_enwik8"
    quality, cost = ("train", "test"), ("iterations_per_s", "gb_per_gpu")
    stdlib = " --data stdlib"
    return (
        Claim(
            "Table 4",
            "On enwik8, AFT-local of window 32 comes within 0.024 bits of the best Transformer on test, ahead of "
            "Reformer, Synthesizer, Linear Transformer and Performer; on training bytes it is the best of all.",
            (
                *of_recipe(name, "table4/", quality, "bits/char", label=BOTH),
                Number(
                    "gap to the 24-layer Transformer", "0.024", "bits/char", why=GIVE.format("0.024"), without=TOO_LARGE
                ),
            ),
            code="lab.recipes.aft_enwik8",
            command=TRAIN.format(name, "table4", "table4/aft_local_32_24x256") + stdlib,
            small="quality.md#in-the-papers-blocks",
            trials=(
                Trial("enwik8_paper", "aft_local", "worse", "attention"),
                Trial("enwik8_modern", "aft_local", "worse", "attention"),
            ),
        ),
        Claim(
            "Table 4, speed and memory",
            "AFT-local needs a third of the Transformer's memory and trains 44 % faster (batch 128, 8 V100). That "
            "compares with the 12-layer Transformer, the gap of Table 4 with the 24-layer one.",
            (
                *of_recipe(name, "table4/", cost, "it/s, GB", "{:.4g}", without=NOT_YET),
                Number("faster than the 12-layer Transformer", "44", "%", why=GIVE.format("43.7")),
                Number("Transformer's memory over AFT-local's", "about 3", "times", why=GIVE.format("2.6")),
            ),
            code="mixers.aft.AFTLocal",
        ),
        Claim(
            "Table 5",
            "A bias over a few tokens is what AFT gains most from; a window of 32 is the best, and all tokens are no "
            "better than 64. Window 0 is AFT-simple, 1,024 is AFT-full.",
            of_recipe(name, "table5/", quality, "bits/char", label=BOTH),
            code="mixers.aft.AFTLocal",
            command=TRAIN.format(name, "window_8", "table5/window_8") + stdlib,
            small="quality.md#aft-local-by-window",
            trials=(
                Trial("enwik8_paper", "aft_local", "better", "aft_simple"),
                Trial("enwik8_modern", "aft_local", "better", "aft_simple"),
                Trial("enwik8_windows", "window 32", "better", "window 128"),
            ),
        ),
        Claim(
            "Table 6",
            "Longer contexts than 1,024 help, although the window stays 32.",
            of_recipe(name, "table6/", quality, "bits/char", label=BOTH),
            code="mixers.aft.AFTLocal",
            small="quality.md#by-sequence-length",
            trials=(Trial("enwik8_lengths", "aft_local, T = 512", "better", "aft_local, T = 128"),),
        ),
    )


def images() -> tuple[Claim, ...]:
    """Return the claims about ImageNet."""
    name = "aft_imagenet"
    return (
        Claim(
            "Table 7",
            "In DeiT's shell and training, AFT-full equals softmax attention and AFT-conv is better, the more heads "
            "the better, in fewer parameters at about the same speed.",
            (
                *of_recipe(name, "table7/", ("top1",), "%", "{:.1f}"),
                Number(
                    "gain of the tiny AFT-conv over DeiT", "2.6", "points", why=GIVE.format("2.6"), without=TOO_LARGE
                ),
            ),
            code="lab.recipes.aft_imagenet",
            command=TRAIN.format(name, "table7", "table7/aft_conv_tiny_k11_h32") + " --train.steps 200",
            small=SMALL,
            trials=(Trial("cifar10", "aft_conv_k7", "better", "attention"),),
        ),
        Claim(
            "Table 7, speed and memory",
            "Images per second and memory of inference on one V100 with batch 256.",
            of_recipe(name, "table7/", ("images_per_s", "gb"), "img/s, GB", "{:.4g}", without=NOT_YET),
            code="models.vit.ViT",
        ),
        Claim(
            "Section 5.3, larger images",
            "AFT-conv has no parameters that belong to one size: trained at 224 it is better at 384, without training "
            "there.",
            trained({"small, kernel 15, 384 heads, tested at 384": "81.6"}, "%"),
            code="mixers.aft_conv.AFTConv",
            small="vision.md#the-trained-models-taken-further",
        ),
        Claim(
            "Section 5.3, global connectivity",
            "Without the sum over all tokens outside of a window of 7, accuracy falls.",
            of_recipe("ablations", "global/", ("top1",), "%", "{:.1f}"),
            code="lab.recipes.ablations",
            command=TRAIN.format("ablations", "global", "global/k7_window_only") + " --train.steps 200",
            small=SMALL,
            trials=(Trial("cifar10_one_seed", "aft_conv_k7_window", "worse", "aft_conv_k7"),),
        ),
        Claim(
            "Table 8",
            "An AFT-conv that starts from a trained DeiT's weights, all but class token, positions, queries and keys, "
            "passes that DeiT after 100 epochs; from random weights it does not.",
            of_recipe(name, "table8/", ("top1",), "%", "{:.1f}"),
            code="hosts.vit.convert",
            small="vision.md#the-trained-models-taken-further",
        ),
        Claim(
            "Table 8, speed and memory",
            "Images per second and memory at 384.",
            of_recipe(name, "table8/", ("images_per_s", "gb"), "img/s, GB", "{:.4g}", without=NOT_YET),
            code="models.vit.ViT",
        ),
        Claim(
            "Figure 1",
            "The attention of trained ViTs, averaged over queries and images by relative position, is concentrated "
            "near the query; so are the learned biases of AFT.",
            trained({"pictures of 12 layers x 6 heads x 27 x 27": "a picture"}),
            code="lab.report.maps",
        ),
    )


def appendix() -> tuple[Claim, ...]:
    """Return the claims of the appendix, whose numbers are not at hand."""
    rows = (
        ("Table 9", "AFT-full with factors is better than with a bias for each pair.", "table9/small_factors"),
        ("Table 10", "AFT-conv needs gamma and beta over normalised filters.", "table10/raw"),
        ("Table 11", "Larger filters are better, and 3 x 3 comes near DeiT already.", "table11/k3"),
        ("Table 12", "Without the query, AFT-conv is clearly worse.", "table12/k11_no_query"),
    )
    sweep = "cifar10_one_seed"
    trials = (
        Trial(sweep, "aft_full", "better", "aft_full, plain bias"),
        Trial(sweep, "aft_conv_k7_raw", "worse", "aft_conv_k7"),
        Trial(sweep, "aft_conv_k11", "better", "aft_conv_k3"),
        Trial(sweep, "aft_conv_k7_no_query", "worse", "aft_conv_k7"),
    )
    return (
        *(
            Claim(
                section,
                says,
                trained({"direction; the numbers are not at hand": "a direction"}, source=SECOND_HAND),
                code="lab.recipes.ablations",
                command=TRAIN.format("ablations", row.split("/")[0], row) + " --train.steps 200",
                small=SMALL,
                trials=(trial,),
            )
            for (section, says, row), trial in zip(rows, trials, strict=True)
        ),
        Claim(
            "Appendix, sparse filters",
            "AFT-conv whose filters have a single tap per head still works; the numbers are not at hand.",
            trained({"direction": "a direction"}, source=SECOND_HAND),
            code="lab.train.sparsity",
        ),
    )
