"""Test of the audit on a history of connections with TLS that are cut under load."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.integration.broker_process import TRUENEXT
from tests.integration.test_tls_cuts import CUTS, SEED, history_of_cuts


@pytest.mark.skipif(
    "TRUENEXT_CUTS" not in os.environ, reason="half a minute, for make guard; the history is looked at anyway"
)
@pytest.mark.timeout(300 + CUTS)
def test_the_audit_finds_nothing_in_a_history_of_connections_with_tls_that_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_CUTS={CUTS}")
    data = history_of_cuts(tmp_path, CUTS, random.Random(SEED), monkeypatch)
    audit = subprocess.run(
        [TRUENEXT, "audit", str(data), "--master", "local[2]", "--out", str(tmp_path / "report")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
