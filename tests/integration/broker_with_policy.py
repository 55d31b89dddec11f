"""A broker whose queues have another policy: `python broker_with_policy.py JSON serve ...` is `truenext serve ...`."""

import json
import sys
from functools import partial
from unittest import mock

from truenext.cli import main
from truenext.policy import Policy, WhileWaiting

if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    if "while_waiting" in fields:
        fields["while_waiting"] = WhileWaiting(fields["while_waiting"])
    with mock.patch.object(main, "Policy", partial(Policy, **fields)):
        main.main(sys.argv[2:])
