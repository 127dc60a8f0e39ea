"""Sums over keys, exact for any finite input: the building blocks of the functional forms."""
