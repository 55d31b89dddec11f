"""Test of the audit on a history of truenext's own client over connections that break."""

import asyncio
import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.integration.broken_network import Break, broken_network
from tests.integration.broker_process import TRUENEXT, BrokerProcess
from tests.integration.test_client_breaks import BREAKS, SEED, check_copied, copying_until_all_is_copied, fill, hurry


@pytest.mark.skipif(
    "TRUENEXT_CLIENT_MESSAGES" not in os.environ,
    reason="half a minute, for make broken; the history is looked at anyway",
)
def test_the_audit_finds_nothing_in_a_copy_through_a_network_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    print(f"TRUENEXT_SEED={SEED}")
    chance = random.Random(SEED)
    broker = BrokerProcess(tmp_path)

    async def run() -> None:
        expected = await fill(broker, chance)
        async with broken_network(lambda: broker.port, chance) as network:
            network.breaks, network.breaks_max = tuple(Break), BREAKS[Break.FREEZES] * 2
            await copying_until_all_is_copied(network, broker, chance)
        await check_copied(broker, expected)

    try:
        broker.start()
        asyncio.run(run())
        broker.stop()
    finally:
        broker.clean_up()
    audit = subprocess.run(
        [TRUENEXT, "audit", str(broker.data), "--master", "local[2]", "--out", str(tmp_path / "report")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
