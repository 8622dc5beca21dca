"""Everything that the planner knows of one model, as one HTML page that needs nothing but itself.

subject    what a page is about: a model, contexts, devices, requests
page       the whole document; `sections` its parts
charts, curve, layer_map    the drawings: inline SVG made here, in the colours of `style`
tables, markup, picture     HTML and SVG by construction, every text escaped
file       the page on disk, whole or not at all

No script, no request to any network, and no clock: equal subjects give equal bytes.
"""

from __future__ import annotations

from rorqual.planner.report.file import check_path, write
from rorqual.planner.report.page import page
from rorqual.planner.report.subject import Subject

__all__ = ["Subject", "check_path", "page", "write"]
