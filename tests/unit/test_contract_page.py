"""Tests that the clauses of docs/contract.md are numbered, and that each is named by a test, an oracle or the audit."""

import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLAUSE = re.compile(r"\bC(\d+)\.(\d+)\b")


def clauses() -> list[tuple[int, int]]:
    """Return chapter and number of each clause of the page, in its order."""
    text = (ROOT / "docs" / "contract.md").read_text()
    return [(int(chapter), int(number)) for chapter, number in re.findall(r"\*\*C(\d+)\.(\d+)\*\* ", text)]


def mentioned(text: str) -> set[tuple[int, int]]:
    return {(int(chapter), int(number)) for chapter, number in CLAUSE.findall(text)}


def named() -> dict[tuple[int, int], Path]:
    """Return the clauses that tests, oracles and the audit name, each with one file that does."""
    folders = ROOT / "tests", ROOT / "src" / "truenext" / "spark" / "audit"
    files = [path for folder in folders for path in folder.rglob("*.py") if path != Path(__file__)]
    return {clause: path.relative_to(ROOT) for path in files for clause in mentioned(path.read_text())}


def test_clauses_are_numbered_consecutively_in_their_chapters() -> None:
    text = (ROOT / "docs" / "contract.md").read_text()
    chapters = [int(number) for number in re.findall(r"^## (\d+) ", text, re.MULTILINE)]
    assert chapters == list(range(1, len(chapters) + 1))
    by_chapter = {chapter: [number for _, number in each] for chapter, each in groupby(clauses(), lambda one: one[0])}
    # The first chapter has the definitions.
    assert list(by_chapter) == chapters[1:]
    for chapter, numbers in by_chapter.items():
        assert numbers == list(range(1, len(numbers) + 1)), f"chapter {chapter}"


def test_each_clause_is_in_the_chapter_of_its_number() -> None:
    text = (ROOT / "docs" / "contract.md").read_text()
    for chapter in re.split(r"^## ", text, flags=re.MULTILINE)[2:]:
        number = int(chapter.split(" ")[0])
        assert {int(each) for each, _ in re.findall(r"\*\*C(\d+)\.(\d+)\*\* ", chapter)} == {number}


def test_clauses_that_the_contract_refers_to_exist() -> None:
    text = (ROOT / "docs" / "contract.md").read_text()
    assert mentioned(text) <= set(clauses())


def test_each_clause_is_named_by_a_test_or_an_oracle() -> None:
    assert sorted(set(clauses()) - named().keys()) == []


def test_tests_and_oracles_name_no_clause_that_does_not_exist() -> None:
    existing = set(clauses())
    assert {clause: str(path) for clause, path in named().items() if clause not in existing} == {}
