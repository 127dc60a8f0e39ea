"""The version of this library, which the build reads from here.

The last commit that changes this file is the last release: `make api` compares with it.
"""

__version__ = "0.2.0"
