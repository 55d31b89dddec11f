"""Test of the contract with everything at once over two takeovers, by the histories of both folders.

TRUENEXT_SECONDS=600 pytest -s tests/spark/test_failovers.py
"""

import random
import time
from pathlib import Path

import pytest

from tests.contract.postgresql.log_writer import DURABLE
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.log_broker import LogBroker, make_schema
from tests.spark.test_everything import CONFIG, SECONDS, Everything, judge
from tests.stages.postgres import own_server

SCHEMA = "everything"


class EverythingInPostgresql(Everything):
    """Two brokers and their users: `broker` is active, `heir` stands by."""

    def __init__(self, broker: LogBroker, heir: LogBroker) -> None:
        super().__init__(broker)
        self.heir: BrokerProcess = heir

    def end_broker(self, *, is_clean: bool) -> None:
        former = self.broker
        if is_clean:
            self._hand_over()
        else:
            former.kill()
        self.heir.await_start()
        self.broker, self.heir = self.heir, former
        former.close_clients()
        former.begin_start()

    def _hand_over(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        # Until the heir has followed.
        while (done := self.broker.truenext("failover")).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.1)
        assert self.broker.wait_for_end() == 3


@pytest.mark.alternates("stories")
@pytest.mark.timeout(600 + 2 * SECONDS)
def test_the_contract_holds_with_everything_at_once_over_two_takeovers(tmp_path: Path) -> None:
    """C28.6, C28.16"""
    with own_server(**DURABLE) as server:
        make_schema(server, SCHEMA)
        brokers = [LogBroker(tmp_path / name, server, SCHEMA, ["--member", name]) for name in ("first", "second")]
        for name in ("first", "second"):
            with (tmp_path / name / "broker.toml").open("a") as config:
                config.write(CONFIG)
        everything = EverythingInPostgresql(*brokers)
        try:
            everything.broker.start()
            everything.heir.begin_start()
            everything.work_over_two_ends()
            everything.broker.stop()
            # It may stand by, or have taken over.
            everything.heir.await_start()
            everything.heir.stop()
        finally:
            for broker in brokers:
                broker.clean_up()
        # Each has all of the history (C28.16): they are one, and a difference is a finding.
        random.shuffle(brokers)
        judge([broker.data for broker in brokers], tmp_path)
