"""`tokenmix look sentence`: a page that shows step by step what a trained text model does with one sentence."""

from .collect import explain
from .explained import Explained
from .page import render, write_page

__all__ = ["Explained", "explain", "render", "write_page"]
