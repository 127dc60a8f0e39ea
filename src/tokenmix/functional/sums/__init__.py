"""Sums over keys, exact for any finite input: what the functional forms compute with."""
