"""Markdown that the pages of the reference share: wrapped text, tables, paragraphs of a docstring."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 120
"""Length of a line, in characters; rows of tables are longer."""


def joined(parts: Iterable[str]) -> str:
    """Return a page of these parts, with an empty line between two of them."""
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def wrapped(text: str, mark: str = "") -> str:
    """Return the text in lines, the first behind `mark` and the others indented as far."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def item(text: str) -> str:
    """Return an item of a list."""
    return wrapped(text, "- ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells may have line breaks and `|`."""
    lines = [head, ["---"] * len(head), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return linked(" ".join(text.split())).replace("|", "\\|")


def linked(text: str) -> str:
    """Return the text with links in place of the names of pages."""
    text = re.sub(r"`?docs/reference/([a-z-]+\.md)`?", r"[\1](\1)", text)
    return re.sub(r"`?docs/([a-z-]+\.md)`?", r"[\1](../\1)", text)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def fence(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def paragraphs(doc: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring. Those that are indented are code, and lists stay lists."""
    for paragraph in linked(doc).split("\n\n"):
        if not paragraph.strip():
            continue
        lines = paragraph.strip("\n").split("\n")
        if all(line.startswith("    ") for line in lines):
            yield fence(textwrap.dedent("\n".join(lines)), "")
        elif lines[0].startswith("- "):
            yield "\n".join(map(item, f"\n{paragraph.strip()}".split("\n- ")[1:]))
        else:
            text = " ".join(paragraph.split())
            yield wrapped(text.replace("Raises:", "**Raises:**", 1) if text.startswith("Raises:") else text)
