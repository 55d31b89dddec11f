"""A program of truenext's client that uses all that a client of one version needs from a broker of another one.

    python -m tests.kept.conversation URL QUEUE      prints a line for each thing that it has found

It uses nothing but what every kept version of truenext has. `EXPECTED` and `EXPECTED_FURTHER` are the lines.
"""

import sys
import time
from collections.abc import Iterator
from threading import Thread

from truenext import blocking

EXPECTED = [
    "order: high low transient",
    "nacked: 1 attempts, cause 'no stock'",
    "released: 1 attempts",
    "dead: rejected, cause 'never'",
    "rolled back: again",
    "committed: moved",
    "committed once: True False",
    "group: a 1, a 2, b 1",
    "reply to: asked",
    "replied: answered, c",
    "without buffer: 1",
    "durable: news",
    "delayed: late",
    "numbered: once",
]


EXPECTED_FURTHER = ["asked: answered", "browsed: 1 2 3", "expired: None"]

TTL_S = 1.0
"""Time to live of a message that expires, long enough for a loaded machine to send it."""


def converse(url: str, queue: str) -> Iterator[str]:
    address = f"/queue/{queue}"
    with blocking.connect(url, client_id=queue, heart_beat=0) as connection:
        connection.send(address, "low", priority=1)
        connection.send(address, "high", priority=8)
        connection.send(address, "transient", priority=0, persistent=False)
        with connection.consumer(address) as consumer:
            yield f"order: {' '.join(take(consumer).text for _ in range(3))}"

        connection.send(address, "failing")
        with connection.consumer(address, ack="individual") as consumer:
            take(consumer).nack(delay=0, cause="no stock")
            message = take(consumer)
            yield f"nacked: {message.attempts} attempts, cause {message.last_cause!r}"
            message.release()
            message = take(consumer)
            yield f"released: {message.attempts} attempts"
            message.reject(cause="never")
            with connection.consumer(f"/queue/DLQ.{queue}") as dead:
                message = take(dead)
                yield f"dead: rejected, cause {message.last_cause!r}"

        connection.send(address, "again")
        with connection.session(transacted=True) as session, session.consumer(address) as consumer:
            take(consumer)
            session.rollback(failed=False)
            message = take(consumer)
            yield f"rolled back: {message.text}"
            session.send(f"{address}.to", "moved")
            session.commit()
        with connection.consumer(f"{address}.to") as consumer:
            yield f"committed: {take(consumer).text}"
        with connection.session(transacted=True) as session:
            found = []
            for _ in range(2):
                session.send(f"{address}.once", "once")
                found.append(session.commit(producer=f"{queue}.commits", number=1))
            yield f"committed once: {found[0]} {found[1]}"

        for group, number in (("a", 1), ("a", 2), ("b", 1)):
            connection.send(address, f"{group} {number}", group=group)
        with connection.consumer(address) as consumer:
            yield f"group: {', '.join(take(consumer).text for _ in range(3))}"

        answers = f"{address}.answers"
        connection.send(address, "asked", reply_to=answers, correlation_id="c")
        with connection.consumer(address) as consumer:
            message = take(consumer)
            connection.reply(message, "answered")
            yield f"reply to: {message.text}"
        with connection.consumer(answers) as consumer:
            message = take(consumer)
            yield f"replied: {message.text}, {message.headers['correlation-id']}"

        connection.send_many(address, ["1", "2", "3"])
        with connection.consumer(address, prefetch=0) as consumer:
            yield f"without buffer: {take(consumer).text}"
            consumer.receive_many(2, 5)

        with connection.consumer("/topic/" + queue, durable="news"):
            pass
        connection.send(f"/topic/{queue}", "news")
        with connection.consumer("/topic/" + queue, durable="news") as consumer:
            yield f"durable: {take(consumer).text}"
        connection.unsubscribe("news")

        connection.send(address, "late", delay=0.1)
        with connection.consumer(address) as consumer:
            yield f"delayed: {take(consumer).text}"
        for _ in range(2):
            connection.send(f"{address}.numbered", "once", producer=f"{queue}.sends", number=1)
        with connection.consumer(f"{address}.numbered") as consumer:
            found_all = [each.text for each in iter(lambda: consumer.receive(0.2), None)]
            yield f"numbered: {' '.join(found_all)}"


def take(consumer: blocking.Consumer) -> blocking.Message:
    message = consumer.receive(10)
    assert message is not None, "no message has come"
    return message


def converse_further(url: str, queue: str) -> Iterator[str]:
    """Do what takes several connections, or time, so that a recording cannot be played."""
    address = f"/queue/{queue}"

    def answer() -> None:
        with blocking.connect(url) as connection, connection.consumer(address) as consumer:
            connection.reply(take(consumer), "answered")

    thread = Thread(target=answer)
    thread.start()
    with blocking.connect(url) as connection:
        yield f"asked: {connection.request(address, 'asked', timeout=10).text}"
        thread.join()
        connection.send_many(address, ["1", "2", "3"])
        yield f"browsed: {' '.join(each.text for each in connection.browse(address))}"
        connection.send(f"{address}.expired", "expired", ttl=TTL_S)
        time.sleep(TTL_S)
        with connection.consumer(f"{address}.expired") as consumer:
            yield f"expired: {consumer.receive(0.2)}"


if __name__ == "__main__":
    for line in (*converse(*sys.argv[1:]), *converse_further(*sys.argv[1:])):
        print(line, flush=True)
