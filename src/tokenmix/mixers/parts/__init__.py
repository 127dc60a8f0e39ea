"""Parts that several mixers share; none of these files defines a mixer."""
