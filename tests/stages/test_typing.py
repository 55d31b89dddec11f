"""Test of type checkers: they find the wrong lines of a service, and no others."""

import os
import re
from pathlib import Path

import pytest
from mypy import api

PAGE = Path(__file__).with_name("typed_service.py")


@pytest.mark.alternates("style")
def test_mypy_sees_each_wrong_line_of_a_service_and_no_other() -> None:
    # The settings of this repository are none of a program's.
    output, complaint, _ = api.run(["--strict", "--config-file=", f"--cache-dir={os.devnull}", str(PAGE)])
    assert not complaint
    found = {int(line) for line in re.findall(rf"{PAGE.name}:(\d+): error:", output)}
    lines = PAGE.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 20
    assert found == wrong, output
