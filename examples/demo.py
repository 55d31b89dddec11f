"""Demo of the order where ActiveMQ's breaks, with a foreign client: what `make demo` runs.

The production case of 2023: ordinary messages (persistent, priority 4) and interactive ones (non-persistent,
priority 9) share a queue. ActiveMQ keeps the two kinds in two buckets and empties one before it reads the other, so
that the interactive messages wait behind the batch. Here stomp.py, a package from PyPI, sends and receives over real
sockets. The broker is a process of its own, which is also killed and started again. At the end Spark proves from the
history that the broker wrote what the client saw: every dispatch was the true next. Beside this stands ActiveMQ's
result for the production case, from a recording of `truenext record` (examples/recordings).

Then a service of stages processes orders, and Spark audits the result of each order (examples/orders). At last Spark
itself reads and writes queues, and is killed (examples/queries).
"""

import argparse
import queue
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import stomp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.broker import Broker
from examples.orders.demo import show as show_orders
from examples.program import exit_on_signals
from examples.queries.demo import show as show_queries
from truenext.errors import ConfigurationError
from truenext.model.url import parse_url
from truenext.spark.audit.command import SPARK_LOG, audit_histories, write_page

RECEIVE_SECONDS = 10.0
"""Seconds after which a message counts as lost."""
CONFIRM_EVERY = 500
REPORT = Path("demo-report")
"""Folder for the audit's page and tables, and Spark's log."""
ACTIVEMQ = Path(__file__).parent / "recordings" / "ActiveMQ-5.17.2"
"""Recording of the production case at prefetch 1, with `prioritizedMessages`, by its client."""


class Message(NamedTuple):
    """Message of a case; `number` is its position in the order of sending."""

    number: int
    priority: int
    persistent: bool


class Result(NamedTuple):
    case: str
    prefetch: int
    sent: list[Message]
    delivered: list[int]
    """Numbers, in order of delivery."""
    seconds: float

    def expected(self) -> list[int]:
        return [message.number for message in sorted(self.sent, key=lambda each: (-each.priority, each.number))]

    @property
    def lost(self) -> int:
        return len({message.number for message in self.sent} - set(self.delivered))

    @property
    def misplaced(self) -> int:
        """Number of deliveries other than the message that was due at that position."""
        return sum(due != delivered for due, delivered in zip(self.expected(), self.delivered, strict=False))

    @property
    def last_9(self) -> int:
        """Position, from 1, of the last message of priority 9; 0 if there is none."""
        nines = {message.number for message in self.sent if message.priority == 9}
        return max((position for position, number in enumerate(self.delivered, 1) if number in nines), default=0)

    @property
    def is_right(self) -> bool:
        return not self.lost and not self.misplaced and len(self.delivered) == len(self.sent)


class Client(stomp.ConnectionListener):
    """STOMP 1.2 connection of stomp.py."""

    def __init__(self, url: str) -> None:
        self.messages: queue.Queue[stomp.utils.Frame] = queue.Queue()
        self._receipts: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        address = parse_url(url)
        self._connection = stomp.Connection12([(address.host, address.port)], reconnect_attempts_max=1)
        self._connection.set_listener("demo", self)
        self._connection.connect(wait=True)

    def on_message(self, frame: stomp.utils.Frame) -> None:
        self.messages.put(frame)

    def on_receipt(self, frame: stomp.utils.Frame) -> None:
        self._receipts.put(frame.headers["receipt-id"])

    def on_error(self, frame: stomp.utils.Frame) -> None:
        self._errors.append(frame.headers.get("message", "?"))

    def send(self, destination: str, message: Message, **headers: str) -> None:
        self._connection.send(
            destination,
            str(message.number),
            priority=str(message.priority),
            persistent="true" if message.persistent else "false",
            **headers,
        )

    def subscribe(self, destination: str, prefetch: int) -> None:
        headers = {"activemq.prefetchSize": str(prefetch)}
        self._connection.subscribe(destination, id="1", ack="client-individual", headers=headers)

    def acknowledge(self, frame: stomp.utils.Frame, receipt: str | None = None) -> None:
        self._connection.ack(frame.headers["ack"], receipt=receipt)

    def await_receipt(self, receipt: str) -> None:
        try:
            while self._receipts.get(timeout=RECEIVE_SECONDS) != receipt:
                pass
        except queue.Empty:
            raise SystemExit(f"no receipt {receipt} within {RECEIVE_SECONDS:g} s; {self._errors}") from None

    def close(self) -> None:
        self._connection.disconnect()

    def abandon(self) -> None:
        """Close the socket to a dead broker without a DISCONNECT."""
        self._connection.transport.disconnect_socket()


@contextmanager
def client(broker: "Broker | RunningBroker") -> Iterator[Client]:
    connection = Client(broker.url)
    try:
        yield connection
    finally:
        connection.close()


def send_all(sender: Client, destination: str, messages: list[Message]) -> None:
    """Send in order; return once the broker has confirmed all messages."""
    for message in messages[:-1]:
        if message.number % CONFIRM_EVERY == 0:
            receipt = f"{destination}-{message.number}"
            sender.send(destination, message, receipt=receipt)
            sender.await_receipt(receipt)
        else:
            sender.send(destination, message)
    sender.send(destination, messages[-1], receipt="last")
    sender.await_receipt("last")


def receive(receiver: Client, count: int, delivered: list[int], progress: Progress) -> None:
    """Receive and acknowledge `count` messages; the last acknowledgement is confirmed, and so are all before it."""
    task = progress.add_task("  delivered", total=count)
    for position in range(1, count + 1):
        try:
            frame = receiver.messages.get(timeout=RECEIVE_SECONDS)
        except queue.Empty:
            break
        delivered.append(int(frame.body))
        receiver.acknowledge(frame, "acknowledged" if position == count else None)
        progress.advance(task)
    else:
        receiver.await_receipt("acknowledged")
    progress.remove_task(task)


def run_case(
    broker: "Broker | RunningBroker", queue: str, name: str, messages: list[Message], prefetch: int, progress: Progress
) -> Result:
    """Send all messages, then receive all."""
    destination = f"/queue/demo.{queue}.prefetch-{prefetch}"
    started = time.perf_counter()
    with client(broker) as sender:
        send_all(sender, destination, messages)
    delivered: list[int] = []
    with client(broker) as receiver:
        receiver.subscribe(destination, prefetch)
        receive(receiver, len(messages), delivered, progress)
    return Result(name, prefetch, messages, delivered, time.perf_counter() - started)


def run_killed(broker: Broker, prefetch: int, progress: Progress, rng: random.Random) -> Result:
    """Run a persistent case in which the broker is killed twice: while the client sends, and while it receives.

    Messages that were not confirmed before the first kill are sent again under their numbers, and taken once.
    """
    messages = [Message(number, rng.randrange(10), True) for number in range(3000)]
    destination = f"/queue/demo.killed.prefetch-{prefetch}"
    producer = {"truenext-producer": f"demo-{prefetch}"}
    started = time.perf_counter()
    sender = Client(broker.url)
    confirmed = 0
    for message in messages[:1700]:
        numbered = {**producer, "truenext-number": str(message.number + 1)}
        if message.number in (1000, 1600):
            sender.send(destination, message, receipt=str(message.number), **numbered)
            sender.await_receipt(str(message.number))
            confirmed = message.number
        else:
            sender.send(destination, message, **numbered)
    broker.kill()
    progress.console.print("  kill -9 while sending, start again")
    sender.abandon()
    broker.start()
    with client(broker) as sender:
        for message in messages[confirmed:]:
            sender.send(destination, message, **producer, **{"truenext-number": str(message.number + 1)})
        sender.send(destination, messages[-1], receipt="all", **producer, **{"truenext-number": str(len(messages))})
        sender.await_receipt("all")

    delivered: list[int] = []
    receiver = Client(broker.url)
    receiver.subscribe(destination, prefetch)
    receive(receiver, 1200, delivered, progress)
    broker.kill()
    progress.console.print("  kill -9 while receiving, start again")
    receiver.abandon()
    broker.start()
    with client(broker) as receiver:
        receiver.subscribe(destination, prefetch)
        receive(receiver, len(messages) - len(delivered), delivered, progress)
        # Another message would be a duplicate.
        time.sleep(0.2)
        while not receiver.messages.empty():
            delivered.append(int(receiver.messages.get().body))
    return Result("persistent, kill -9 twice", prefetch, messages, delivered, time.perf_counter() - started)


def production() -> list[Message]:
    batch = [Message(number, 4, True) for number in range(3000)]
    return batch + [Message(number, 9, False) for number in range(3000, 4000)]


def alternation() -> list[Message]:
    return [Message(number, 4, number % 2 == 0) for number in range(2000)]


def mix(rng: random.Random) -> list[Message]:
    return [Message(number, rng.randrange(10), rng.random() < 0.5) for number in range(3000)]


class RunningBroker(NamedTuple):
    """Broker of any make that was started before the demo."""

    url: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--url", help="address of a running STOMP broker of any make, stomp://HOST:PORT; it is not killed"
    )
    url = parser.parse_args().url
    if url is not None:
        try:
            parse_url(url)
        except ConfigurationError as error:
            parser.error(str(error))
    exit_on_signals()
    console = Console(width=None if sys.stdout.isatty() else 120)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    console.print("[bold]The true next, under the production case that broke ActiveMQ[/bold]")
    console.print(f"Client: stomp.py {stomp.__version__}; random seed {seed}\n")
    results: list[Result] = []
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        own_broker = None
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="truenext-demo-"))
            own_broker = Broker(Path(folder) / "truenext")
            stack.callback(own_broker.stop)
        broker = own_broker or RunningBroker(url)
        for prefetch in (1, 1000):
            for queue, name, messages in (
                ("production", "3000 persistent 4, 1000 transient 9", production()),
                ("alternation", "persistent, transient in turn", alternation()),
                ("mix", "random mix", mix(rng)),
            ):
                progress.console.print(f"{name}, prefetch {prefetch}")
                results.append(run_case(broker, queue, name, messages, prefetch, progress))
            if own_broker is not None:
                progress.console.print(f"persistent, kill -9 twice, prefetch {prefetch}")
                results.append(run_killed(own_broker, prefetch, progress, rng))
        progress.stop()
        console.print(summary(results))
        is_right = all(result.is_right for result in results)
        if is_right:
            console.print("[bold green]Every message came, once, and in its place.[/bold green]\n")
        else:
            console.print("[bold red]The order did not hold, or messages are missing.[/bold red]\n")
        if own_broker is not None:
            own_broker.stop()
            is_right &= audit_passes(own_broker.data, console)
            console.print()
            is_right &= show_orders(console, REPORT / "orders")
            console.print()
            is_right &= show_queries(console, REPORT / "queries")
    return 0 if is_right else 1


def audit_passes(data: Path, console: Console) -> bool:
    """Audit the history of the broker with Spark, and the recording of ActiveMQ in the same way."""
    console.print("[bold]Spark audits the history of this broker, and a recording of ActiveMQ[/bold]")
    console.print(f"Spark's own output goes to {REPORT / SPARK_LOG}")
    truenext, activemq = audited = audit_histories([data, ACTIVEMQ], out=REPORT)
    title = "The production case that broke ActiveMQ's order, on truenext and on ActiveMQ 5.17.2"
    write_page(audited, REPORT, title=title)
    if activemq.verdict.has_contract_held:
        console.print("[bold red]The audit finds no fault in the recording of ActiveMQ: it proves nothing.[/bold red]")
    return truenext.verdict.has_contract_held and not activemq.verdict.has_contract_held


def summary(results: list[Result]) -> Table:
    table = Table(
        "case",
        "prefetch",
        "sent",
        "received",
        "out of place",
        "lost",
        "last of 9 at",
        "messages/s",
        title="What stomp.py received; 'last of 9 at' is the place of the last message of priority 9",
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        table.add_row(
            result.case,
            str(result.prefetch),
            str(len(result.sent)),
            str(len(result.delivered)),
            str(result.misplaced),
            str(result.lost),
            str(result.last_9 or "-"),
            f"{len(result.delivered) / result.seconds:,.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
