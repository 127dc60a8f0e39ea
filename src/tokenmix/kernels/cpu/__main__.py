"""Compile the C kernels: ``python -m tokenmix.kernels.cpu``."""

from .build import main

main()
