"""TransHuman: a Transformer over the tokens of a painted body. Not built yet."""

from __future__ import annotations

from .claim import Claim, Paper
from .rows import trained


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    table_1 = {
        "pose, NHP": "24.60 / 0.910 / 0.147",
        "pose, GP-NeRF": "25.05 / 0.909 / 0.159",
        "pose, TransHuman": "27.25 / 0.936 / 0.087",
        "identity, NHP": "24.94 / 0.905 / 0.144",
        "identity, GP-NeRF": "24.55 / 0.902 / 0.157",
        "identity, TransHuman": "26.15 / 0.918 / 0.098",
        "identity by GP-NeRF's split, GP-NeRF": "26.83 / 0.924 / 0.132",
        "identity by GP-NeRF's split, TransHuman": "27.55 / 0.933 / 0.090",
        "one shot, NHP": "23.20 / 0.877 / 0.182",
        "one shot, TransHuman": "24.11 / 0.891 / 0.142",
        "ZJU to H36M, NHP": "18.84 / 0.820 / 0.222",
        "ZJU to H36M, TransHuman": "20.48 / 0.856 / 0.169",
    }
    sizes = {"vertices": "6,890", "clusters, which are tokens": "300", "features": "192", "blocks / heads": "12 / 3"}
    field = {"nearest centres": "7", "features of a point": "255", "frequencies of a place": "10"}
    table_6 = {"TransHuman": "6.08", "NHP": "5.80", "GP-NeRF": "9.52"}
    return (
        Claim(
            "Tokens of the body",
            "Image features painted on the body model's vertices are averaged over clusters found in the rest pose; a "
            "ViT-tiny lets the clusters see one another, with positions of their centres in that pose.",
            trained(sizes, built=False),
        ),
        Claim(
            "Field around the body",
            "A point reads its nearest clusters, each in that cluster's own coordinates, weighted by distance.",
            trained(field, built=False),
            "w = softmax_k(-||p - c_k|| / 0.5), sum_k w_k [token_k; PE(R_k^T (p - c_k))]",
        ),
        Claim(
            "Fine features",
            "The point's representation attends the pixels of the views by cross-attention.",
            trained({"width of queries and keys": "128"}, built=False),
            "A = softmax_views(K^T Q / sqrt(128))",
        ),
        Claim(
            "Table 1", "PSNR / SSIM / LPIPS on bodies in new poses and of new people.", trained(table_1, built=False)
        ),
        Claim("Table 6, parameters", "Millions of parameters.", trained(table_6, "M", built=False)),
        Claim(
            "Table 6, cost",
            "Minutes of inference, memory of inference and of training; with 16 points in place of 64, and its PSNR.",
            trained(
                {"inference": "17 min, 6.2 GB", "training": "7.8 GB", "16 points": "9 min, 5.7 GB, 25.39"}, built=False
            ),
        ),
    )


PAPER = Paper(
    "transhuman",
    "TransHuman: A Transformer-based Human Representation for Generalizable Neural Human Rendering",
    "Pan et al. 2023",
    "2307.12291",
    state,
)
