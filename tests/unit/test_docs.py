"""Tests that links and file names in the pages, and citations of decisions in the code, lead to what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
OF_OTHERS = {"stomp.py", *re.findall(r"ave (?:this |it )?as\s+`([a-z_]+\.py)`", "".join(map(Path.read_text, PAGES)))}
"""A library, and files that the reader writes."""
DECISIONS = [path.name for path in (ROOT / "docs" / "decisions").glob("*.md")]
CODE = [path for folder in ("src", "tests", "bench", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
CITING = [ROOT / "CHANGELOG.md", *sorted(path for path in CODE if re.search("[Dd]ecisions?[/ ]", path.read_text()))]
"""The changelog, and code that may cite decisions."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links_of(page: Path) -> list[str]:
    """Return the targets of the links in a page. Code has none."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()) if page.suffix == ".md" else []
    return [link for link in links if "://" not in link]


def cited_decisions(text: str) -> set[str]:
    """Return the names of files of decisions, and the numbers of decisions in four digits, that a text cites."""
    in_one_line = re.sub(r"\s+(?:#\s+)?", " ", text)
    numbers = re.findall(r"\b[Dd]ecisions? (\d+(?:(?:, | and |, and )\d+)*)", in_one_line)
    names = re.findall(r"\b\d{4}-[a-z0-9-]+\.md\b|(?<=decisions/)\d{4}", text)
    return {*names, *(number.zfill(4) for found in numbers for number in re.findall(r"\d+", found))}


@pytest.mark.parametrize("page", [*PAGES, *CITING], ids=name_of)
def test_a_link_leads_somewhere(page: Path) -> None:
    missing = [link for link in links_of(page) if not (page.parent / link).exists()]
    cited = cited_decisions(page.read_text())
    assert not missing
    assert not [name for name in cited if not any(file.startswith(name) for file in DECISIONS)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("name", sorted(set(DECISIONS) - {"README.md"}))
def test_a_decision_has_at_most_300_words(name: str) -> None:
    assert len((ROOT / "docs" / "decisions" / name).read_text().split()) <= 300
