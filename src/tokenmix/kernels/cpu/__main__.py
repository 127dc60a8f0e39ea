"""``python -m tokenmix.kernels.cpu`` compiles the C kernels."""

from .build import main

main()
