"""A broker whose queues have another policy: `python broker_with_policy.py JSON serve ...` is `truenext serve ...`."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from truenext.broker.config import Configuration, configure
from truenext.cli import main
from truenext.policy import WhileWaiting

if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    if "while_waiting" in fields:
        fields["while_waiting"] = WhileWaiting(fields["while_waiting"])

    def configured(config: Path | None, *, broker: dict[str, Any], policy: dict[str, Any]) -> Configuration:
        return configure(config, broker=broker, policy=policy | fields)

    with mock.patch.object(main, "configure", configured):
        main.main(sys.argv[2:])
