"""Tests that links and file names in the pages lead to pages and files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
OF_OTHERS = {"stomp.py", *re.findall(r"ave (?:this |it )?as\s+`([a-z_]+\.py)`", "".join(map(Path.read_text, PAGES)))}
"""A library, and files that the reader writes."""
OLD_NAMES = ROOT / "docs" / "decisions" / "0075-one-vocabulary.md"
"""Lists files by the names that they had."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page != OLD_NAMES], ids=name_of)
def test_a_file_of_the_code_that_is_named_is_there(page: Path) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())) - OF_OTHERS
    missing = [
        name
        for name in named
        if not (ROOT / name).exists() and not any(source.endswith(f"/{name}") for source in SOURCES)
    ]
    assert not [name for name in missing if not list((ROOT / "tests").rglob(Path(name).name))]


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert not [page for page in pages if f"({page})" not in index]
