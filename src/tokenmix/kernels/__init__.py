"""Fast code, every part of it optional: ``cpu`` is a C library reached through ctypes, ``triton`` holds CUDA kernels. Nothing here is needed to be right."""
