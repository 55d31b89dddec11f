"""Broker with a folder for backups, whose frames are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration import tapped_broker
from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import Forked
from tests.integration.raw_client import RawClient


class BackupBroker(BrokerProcess):
    def __init__(self, folder: Path, options: Sequence[str] = (), settings: str = 'backup_dir = "backups"') -> None:
        """Prepare a broker with `settings` in [broker] of its configuration file."""
        (folder / "truenext.toml").write_text(f"[broker]\n{settings}\n")
        super().__init__(folder, [*options, "--config", str(folder / "truenext.toml")])
        self.backups = folder / "backups"
        self.backups.mkdir(mode=0o700)
        self.tap = folder / "tap"

    def _started(self, command: list[str]) -> Forked:
        return Forked([str(self.tap), *command], stdout=self._out, stderr=self._log, run=tapped_broker.main)

    def request_backup(self, **body: Any) -> dict[str, Any]:
        """Send the control request `backup`, and return the answer."""
        client = RawClient(self.port)
        try:
            client.send_connect("1.2", "0,0")
            client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
            headers = {"destination": "/control/backup", "reply-to": "/temp-queue/answers"}
            client.send_frame("SEND", headers, json.dumps(body).encode())
            answer: dict[str, Any] = json.loads(client.message().body)
            client.disconnect()
        finally:
            client.close()
        return answer
