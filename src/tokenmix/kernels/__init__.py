"""Fast code, all of it optional: ``cpu`` is a C library reached through ctypes, ``triton`` holds CUDA kernels. Nothing here is needed for correctness."""
