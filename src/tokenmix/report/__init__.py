"""From run directories to one self-contained HTML page. Nothing here trains anything."""

from .page import write_report as write_report
from .runs import Run as Run
from .runs import read_run as read_run
from .tables import Table as Table
from .vision import draw_pictures as draw_pictures
from .vision import vision_section as vision_section
