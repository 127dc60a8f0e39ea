"""Build one self-contained HTML page from run directories. Nothing here trains anything."""

from ..system.text import Table as Table
from .page import write_report as write_report
from .runs import Run as Run
from .runs import read_run as read_run
from .vision import draw_pictures as draw_pictures
from .vision import vision_section as vision_section
