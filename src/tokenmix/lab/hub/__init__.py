"""Runs as Hugging Face folders: weights, processor and model card."""

from .export import export_run

__all__ = ["export_run"]
