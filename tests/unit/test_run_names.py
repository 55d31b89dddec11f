"""Tests that runs which `truenext audit` compares have different names and tables of their own."""

from pathlib import Path

import pytest

from truenext.errors import ConfigurationError
from truenext.spark.audit.run_names import run_names


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a"], ["a"]),
        (["a", "b/"], ["a", "b"]),
        (["a/data", "b/data"], ["a/data", "b/data"]),
        (["a/data", "b/data", "b"], ["a/data", "b/data", "b"]),
        (["x/a/data", "y/a/data", "y/b/data"], ["x/a/data", "y/a/data", "b/data"]),
        (["/data", "/b/data"], ["data", "b/data"]),
        (["s3a://one/data", "s3a://two/data/"], ["one/data", "two/data"]),
        (["/", "a"], ["root", "a"]),
    ],
)
def test_names_of_runs_are_as_short_as_distinct_names_can_be(folders: list[str], names: list[str]) -> None:
    assert run_names(folders) == names


def test_names_of_runs_never_lead_out_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert run_names([Path(), Path("..")]) == ["here", tmp_path.name]


@pytest.mark.parametrize("other", ["data", "./data/", "a/../data"])
def test_folder_that_is_named_twice_is_refused(other: str) -> None:
    with pytest.raises(ConfigurationError, match="is named twice"):
        run_names(["data", other])
