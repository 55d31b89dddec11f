"""Programs that cut a store within LMDB's own calls, each in a process of its own that records them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.recorded_calls import COMPILER

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="there is no C compiler (cc) to make the library that records LMDB's calls"
)


def run_recorded(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `tests.contract.MODULE` to its end, with the import path of this process."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.contract.{module}", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parents[2],
    )
