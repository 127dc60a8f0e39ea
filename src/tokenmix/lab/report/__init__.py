"""Build one self-contained HTML page from run directories. Nothing here trains anything."""

from ...system.text import Table
from .notebook import LiveCurve
from .page import write_report
from .runs import Run, read_run
from .vision import draw_pictures, vision_section

__all__ = [
    "LiveCurve",
    "Run",
    "Table",
    "draw_pictures",
    "read_run",
    "vision_section",
    "write_report",
]
