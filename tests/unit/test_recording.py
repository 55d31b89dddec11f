"""Does a recording say what it needs before the work is done?"""

import sys
from pathlib import Path

import pytest

from truenext.errors import ConfigurationError
from truenext.spark.recording import check_folder


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'truenext\[spark\]'"):
        check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()
