"""Tests of the client's options for failures, with both drivers: reports and handlers. Source: docs/protocol.md,
"Reports and handlers" """

import asyncio

from truenext import blocking, connect
from truenext.testing import blocking_broker, broker

REASON = "no such account"


def test_report_and_handled_message_arrive_over_tasks() -> None:
    async def main() -> None:
        async with broker() as here, connect(here.url) as connection:
            await connection.send("/queue/paid", "1", report_to="/queue/reports", report_id="order 17")
            await connection.send("/queue/paid", "2", on_failure=["/queue/first", "/queue/second"])
            paid, first = [await connection.consumer(f"/queue/{name}") for name in ("paid", "first")]
            for consumer in (paid, paid, first):
                message = await consumer.receive(timeout=10)
                assert message is not None
                await message.reject(cause=REASON)
            report = await (await connection.consumer("/queue/reports")).receive(timeout=10)
            handled = await (await connection.consumer("/queue/second")).receive(timeout=10)
            assert report is not None and handled is not None
            assert (report.correlation_id, report.body, report.last_cause) == ("order 17", b"", REASON)
            assert report.headers["truenext-failure"] == "report"
            assert (handled.text, handled.headers["truenext-failure"]) == ("2", "handled")
            assert handled.headers["truenext-original-destination"] == "/queue/paid"

    asyncio.run(main())


def test_report_and_handled_message_arrive_over_threads() -> None:
    with blocking_broker() as here, blocking.connect(here.url) as connection:
        with connection.session(transacted=True) as session:
            session.send("/queue/paid", "1", report_to="/queue/reports", report_id="order-17")
            session.send("/queue/paid", "2", on_failure=("/queue/first",))
            session.commit()
        paid = connection.consumer("/queue/paid")
        for _ in range(2):
            message = paid.receive(timeout=10)
            assert message is not None
            message.reject(cause=REASON)
        report = connection.consumer("/queue/reports").receive(timeout=10)
        handled = connection.consumer("/queue/first").receive(timeout=10)
        assert report is not None and handled is not None
        assert (report.correlation_id, report.body, report.last_cause) == ("order-17", b"", REASON)
        assert (handled.text, handled.last_cause) == ("2", REASON)
