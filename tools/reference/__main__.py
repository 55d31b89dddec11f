"""Command that writes all pages of the reference: `python -m tools.reference`."""

from tools.reference import PAGES, path_of

for name, page in PAGES.items():
    path_of(name).write_text(page(), encoding="utf-8")
