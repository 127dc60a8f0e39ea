"""Compute faster, optionally: ``cpu`` is a C library called through ctypes, ``triton`` holds CUDA kernels.

Nothing here is needed for correctness.
"""
