"""The layout of tokens: blocks, lines, buckets, masks, positions, and the checks of inputs."""
