"""Test of what is not in a log: settings of a broker."""

from pathlib import Path

from tests.contract.postgresql.log_writer import url_of
from tests.integration.broker_process import BrokerProcess
from tests.stages.postgres import PostgresServer


def test_brokers_of_one_log_have_their_own_policies(postgres: PostgresServer, schema: str, tmp_path: Path) -> None:
    """C27.12"""
    place = ["--store", url_of(postgres), "--schema", schema, "--database-limit", "2GiB", "--durability", "local"]
    queues = []
    for attempts_max in (1, 2):
        folder = tmp_path / str(attempts_max)
        folder.mkdir()
        broker = BrokerProcess(folder, place, policy={"attempts_max": attempts_max})
        broker.start()
        try:
            client = broker.connect()
            client.send(f"q{attempts_max}", b"", persistent=True, confirmed=True)
            client.subscribe(f"q{attempts_max}")
            client.nack(client.message(), confirmed=True)
            client.disconnect()
            queues.append({name: facts.waiting for name, facts in broker.queues().items() if facts.waiting})
            broker.stop()
        finally:
            broker.clean_up()
    assert queues == [{"DLQ.q1": 1}, {"DLQ.q1": 1, "q2": 1}]
