"""Hydra Attention: as many heads as features."""

from __future__ import annotations

from . import identities
from .claim import Claim, Number, Paper, Trial
from .counts import complexity, mixing_ratio, mixing_share, saved
from .rows import timed, trained

SECOND_HAND = "second-hand"
FULL_HD = (1088, 1920)
SPEED = "hydra_scale.json:sizes/{}/rows/hydra/ratio_to_fused"
ON_A_CPU = "a ratio of times on a CPU against torch's fused attention, not the paper's machine"


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*equations(), *costs(), *accuracy())


def equations() -> tuple[Claim, ...]:
    """Return the equations, each against the library's form."""
    return (
        Claim(
            "Kernel attention",
            "With a kernel in place of the softmax, keys and values can be summed first. The more heads, the smaller "
            "this sum: D^2 / H features, at a time of T D^2 / H.",
            (Number("grows as, one head", "T d^2", measure=complexity("multihead_linear", width={"heads": 1})),),
            "A(Q, K, V) = phi(Q) (phi(K)^T V)",
            "functional.hydra.multihead_linear",
        ),
        Claim(
            "Hydra",
            "With as many heads as features the sum is one vector, which all tokens gate with their queries: time and "
            "memory T D.",
            (
                Number("our form against the sum written out", "equal", measure=identities.hydra),
                Number("as kernel attention with D heads", "equal", measure=identities.hydra_heads),
                Number("grows as", "T d", measure=complexity("hydra")),
            ),
            "Y_t = phi(Q_t) . sum_t' phi(K_t') . V_t'",
            "functional.hydra.hydra",
        ),
        Claim(
            "Kernel",
            "The kernel is the cosine: queries and keys divided by the norm of the whole token, the values as they "
            "are, and no division by a sum.",
            (Number("queries and keys 3, values 2 times as long: 2 times", "equal", measure=identities.hydra_lengths),),
            "phi(x) = x / ||x||",
            "mixers.hydra.Hydra",
        ),
        Claim(
            "Relation to AFT",
            "AFT-simple is Hydra with a sigmoid on queries and a softmax over tokens on keys.",
            (Number("both forms", "equal", measure=identities.hydra_aft),),
            "phi(Q) = sigmoid(Q), phi(K) = softmax_t(K)",
            "functional.hydra.hydra",
        ),
    )


def costs() -> tuple[Claim, ...]:
    """Return the claims about multiply-accumulates, speed and memory."""
    attention, hydra = "deit_base", "hydra_deit_base"
    not_macs = "the claim is one of speed; in multiply-accumulates at 224 Hydra cannot save more than attention's 4 %"
    return (
        Claim(
            "Share of attention",
            "In ViT-B/16 the attention matrices take a small share of the multiply-accumulates at 224 x 224, and most "
            "of them on an image of 1920 x 1088 (1080p, in whole patches). With Hydra the share is next to nothing.",
            (
                Number("attention at 224", "about 4", "%", mixing_share(attention)),
                Number("Hydra at 224", "0.02", "%", mixing_share(hydra), SECOND_HAND),
                Number("attention at 1080p", "> 60", "%", mixing_share(attention, FULL_HD)),
            ),
            "2 T^2 D a layer against 2 T D",
            "models.macs.macs",
        ),
        Claim(
            "The operation",
            "The operation alone needs T = 197 times fewer multiply-accumulates at 224.",
            (Number("attention over Hydra at 224", "197", "times", mixing_ratio(attention, hydra, 224), SECOND_HAND),),
            "2 T^2 D / 2 T D",
            "mixers.hydra.Hydra",
        ),
        Claim(
            "Speed of DeiT-B",
            "Hydra in all layers makes DeiT-B 10 to 27 % more efficient, by image size (224 and 384).",
            (
                Number(
                    "multiply-accumulates saved at 224", "10 to 27", "%", saved(attention, hydra, 224), why=not_macs
                ),
                Number("faster at 224", "10 to 27", "%", why=ON_A_CPU, result=SPEED.format("224x224")),
                Number("faster at 384", "10 to 27", "%", why=ON_A_CPU, result=SPEED.format("384x384")),
            ),
            code="mixers.hydra.Hydra",
        ),
        Claim(
            "Figure 2, memory",
            "Softmax attention runs out of memory beyond 96 heads, linear attention below 3 heads; Hydra's memory is "
            "the least. Ours is one block of DeiT-B, forward and backward, in MiB.",
            (
                Number(
                    "softmax, more than 96 heads", "out of memory", result="hydra_scale.json:heads/softmax, unfused/768"
                ),
                Number("linear, fewer than 3 heads", "out of memory", result="hydra_scale.json:heads/linear, cosine/1"),
            ),
            code="lab.recipes.hydra_imagenet",
        ),
    )


def accuracy() -> tuple[Claim, ...]:
    """Return the claims that need training."""
    train = "tokenmix train hydra_imagenet --out runs/hydra --row {} --train.steps 200"
    easycv = "EasyCV, an independent training"
    return (
        Claim(
            "Figure 2, heads",
            "In DeiT-B, softmax attention loses accuracy beyond 12 heads, while kernel attention with the cosine "
            "keeps its accuracy up to 768.",
            trained({"softmax, more than 12 heads": "falls", "cosine, up to 768 heads": "flat"}),
            code="lab.recipes.hydra_imagenet",
            command=train.format("fig2/linear_96_heads"),
            small="vision.md#heads-slots-and-long-tails",
            trials=(Trial("cifar10_heads", "softmax, 96", "worse", "softmax, 12"),),
        ),
        Claim(
            "Figure 4",
            "Hydra in a few layers of DeiT-B gains up to 1 point, or keeps the accuracy at a lower cost. The last "
            "layers, or every second one, are the ones to replace (the order is second-hand).",
            trained({"best mix over DeiT-B": "about 1", "two layers": "better than none"}, "points"),
            code="models.named.replace_layers",
            command=train.format("fig4/last_2"),
            small="vision.md#the-trained-models-taken-further",
            trials=(Trial("cifar10_one_seed", "hydra, last 2 of 6", "better", "attention"),),
        ),
        Claim(
            "Tables 1 to 3",
            "Hydra against AFT-simple and PolyNL, the choice of the kernel, fine-tuning at 384: the numbers are not "
            "at hand.",
            trained({"accuracies": "not at hand"}),
            code="lab.recipes.hydra_imagenet",
            command=train.format("kernel/tanh"),
            small="vision.md#cifar-10-at-equal-cost",
        ),
        Claim(
            "Figure 3",
            "What the class token takes from each patch is seen by how much the patch moves the class token's output "
            "of the last layer along the gradient of the predicted class.",
            trained({"pictures": "a picture"}),
            "score_t = (phi(Q_cls) . phi(K_t) . V_t) . g",
            "lab.report.attribution",
        ),
        Claim(
            "Replication, EasyCV",
            "DeiT-B trained for 300 epochs with DeiT's recipe, top-1: Hydra in the last eight layers and in all is "
            "below plain DeiT-B.",
            trained({"no Hydra": "81.756", "last 8 layers": "79.444", "all 12 layers": "76.67"}, "%", source=easycv),
            code="lab.recipes.hydra_imagenet",
        ),
        Claim(
            "Replication, EasyCV, speed",
            "Milliseconds for one image on a V100: no Hydra, last 8 layers, all 12.",
            timed({"no Hydra": "7.98", "last 8 layers": "6.78", "all 12 layers": "6.65"}, "ms", source=easycv),
            code="mixers.hydra.Hydra",
        ),
        Claim(
            "Replication, FLatten",
            "Top-1 of Hydra in DeiT-tiny, beside softmax and three other kernels, and in Swin-tiny.",
            (
                *trained({"DeiT-tiny, Hydra": "68.3", "DeiT-tiny, softmax": "72.2"}, "%", source=SECOND_HAND),
                *trained(
                    {
                        "DeiT-tiny, efficient attention": "70.2",
                        "DeiT-tiny, linear angular": "70.8",
                        "DeiT-tiny, enhanced linear": "72.9",
                        "Swin-tiny, Hydra": "80.7",
                    },
                    "%",
                    source=SECOND_HAND,
                    built=False,
                ),
            ),
            code="mixers.hydra.Hydra",
        ),
    )


PAPER = Paper("hydra", "Hydra Attention: Efficient Attention with Many Heads", "Bolya et al. 2022", "2209.07484", state)
