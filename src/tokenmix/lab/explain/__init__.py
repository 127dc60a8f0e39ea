"""`tokenmix look sentence`: a page that shows step by step what a trained text model does with one sentence."""

from .collect import explain
from .explain_page import render, write_page
from .explained import Explained

__all__ = ["Explained", "explain", "render", "write_page"]
