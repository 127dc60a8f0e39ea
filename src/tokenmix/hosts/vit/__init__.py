"""Weights of Vision Transformers: names, reading, writing, checkpoints, conversion of a whole model."""
