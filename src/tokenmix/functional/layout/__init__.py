"""Where tokens stand: blocks, lines, buckets, masks, positions, and the checks of inputs."""
