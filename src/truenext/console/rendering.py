"""Pages as HTML: the Jinja environment, and files with hashed names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from truenext.console import formats
from truenext.console.pages import links
from truenext.model.numerals import count_noun

FOLDER = Path(__file__).parent
WATERFALL_STYLE = FOLDER.parent / "flows" / "waterfall.css"


class StaticFiles:
    """Files of the console. Their names have a hash of their content, so that a browser may keep them for ever."""

    def __init__(self, folder: Path, *others: Path) -> None:
        """Serve the files of a folder, and `others`, which are called by their names alone."""
        self._folder = folder
        self._others = others

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """Path of each file, by its hashed name."""
        paths = [path for path in sorted(self._folder.rglob("*")) if path.is_file()]
        return {self._hashed(path): path for path in (*paths, *self._others)}

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {self._name(path): hashed for hashed, path in self.files.items()}

    def _name(self, path: Path) -> str:
        return path.name if path in self._others else path.relative_to(self._folder).as_posix()

    def _hashed(self, path: Path) -> str:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return f"{path.stem}.{digest}{path.suffix}"

    def address(self, name: str) -> str:
        """Return the address of a file, such as `console.css` or `vendor/htmx.min.js`.

        Raises: KeyError if there is no such file
        """
        return f"/static/{self._names[name]}"


TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"}
"""Types of static files, by the end of the name. Others, such as licences, are not served."""


class Renderer:
    def __init__(self, folder: Path = FOLDER) -> None:
        self.static = StaticFiles(folder / "static", WATERFALL_STYLE)
        self.environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folder / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            enable_async=False,
        )
        # The lines of a chart have the colours of the legend's entries, in their order.
        self.environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
        self.environment.globals |= {"static": self.static.address, "address": links.address}
        self.environment.globals |= {name: getattr(links, name) for name in dir(links) if name.endswith("_link")}
        self.environment.filters |= {
            name.removeprefix("format_"): getattr(formats, name) for name in dir(formats) if name.startswith("format_")
        }
        self.environment.filters["plural"] = count_noun

    def page(self, template: str, context: Mapping[str, Any]) -> str:
        """Return a whole page as HTML."""
        return self.environment.get_template(f"{template}.html").render(context)

    def is_live(self, template: str) -> bool:
        """Return whether a part of the page changes while the page is shown."""
        return "live" in self.environment.get_template(f"{template}.html").blocks

    def live(self, template: str, context: Mapping[str, Any]) -> str:
        """Return the block `live` of a page's template: the part that changes while the page is shown. It is "" if the
        template has none."""
        loaded = self.environment.get_template(f"{template}.html")
        block = loaded.blocks.get("live")
        return "" if block is None else "".join(block(loaded.new_context(dict(context))))
