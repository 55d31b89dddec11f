"""Tests that a recording reports a missing package before it starts."""

import sys
from pathlib import Path

import pytest

from truenext.errors import ConfigurationError
from truenext.spark.recording import check_folder


def test_recording_without_pyarrow_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'truenext\[spark\]'"):
        check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()
