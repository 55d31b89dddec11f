"""Benchmark of truenext's client.

It is compared with raw sockets, which write the same frames in as many writes and do nothing else; with stomp.py;
truenext.blocking with asyncio; and truenext, client and broker, with aio-pika on RabbitMQ and nats-py on JetStream,
where these are installed. Bodies are of 1 KiB, and messages persistent, except for requests. Client and broker are
each a process of its own. The client and its peer run by turns; the ratio is the median over the pairs of runs.
Queues are filled before the clock starts. The clock stops when the broker has confirmed the client's DISCONNECT, and
so all frames before it.

python -m bench.client --only receive,copy-10 --runs 3 python -m bench.client --only rabbitmq,nats
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bench import frames, machine, queues
from bench.brokers import Broker, Truenext
from bench.client import raw, tasks, threads
from bench.client.work import Done, Order
from bench.foreign import Foreign, Nats, RabbitMQ, no_nats_reason, no_rabbitmq_reason
from bench.load import GROUP, SILENCE, connect, send_confirmed
from bench.options import positive
from bench.progress import guarded, print_line
from bench.workers import Crew, Job, end_in_order

_TRUENEXT_PROMISE = "truenext sends a RECEIPT when the message is forced to the disk"


class PeerSetup(NamedTuple):
    """Setup of a peer that has a broker of its own."""

    broker: type[Foreign]
    prepare: Callable[[int, str, int], Coroutine[None, None, None]]
    """Make a queue, by port and name, with a number of messages."""
    finish: Callable[[int, str, int], Coroutine[None, None, None]]
    """Remove the queue. Raises: ValueError unless this number of messages waits"""


class Case(NamedTuple):
    key: str
    title: str
    job: Job
    peer: str
    peer_job: Job
    target: float
    """Least ratio to the peer's rate, or largest ratio to its round trip."""
    share: int = 1
    """Divisor of the number of messages."""
    batch: int = 1
    prefetch: int | None = None
    answers: tuple[Job, Job] | None = None
    """Jobs that reply, of the client and of the peer; with them, round trips are measured."""
    peer_setup: PeerSetup | None = None

    def is_one_of(self, keys: Sequence[str]) -> bool:
        """Whether a key is that of the case, or its beginning up to a hyphen."""
        return any(f"{self.key}-".startswith(f"{each}-") for each in keys)

    @property
    def fills(self) -> bool:
        return self.answers is None and "send" not in self.key

    @property
    def counts(self) -> bool:
        """Whether writes and frames of both are counted, since they must be the same."""
        return self.peer == "raw"


def cases() -> tuple[list[Case], dict[str, str]]:
    """Return the cases that can be measured here, and by key the reasons why others cannot."""
    found = [
        Case("receive", "receive, each acknowledged by itself", tasks.receive, "raw", raw.receive, 0.6),
        Case("auto", "receive, auto", tasks.iterate, "raw", raw.receive, 0.6),
        Case("send", "send_many", tasks.send_many, "raw", raw.send_many, 0.7),
        *(
            Case(f"copy-{batch}", f"copy in transactions of {batch}", tasks.copy, "raw", raw.copy, 0.6, share, batch)
            for batch, share in ((1, 8), (10, 2), (100, 2))
        ),
        Case(
            "request",
            "request and reply",
            tasks.request,
            "raw",
            raw.request,
            1.5,
            10,
            1,
            None,
            (tasks.reply, raw.reply),
        ),
    ]
    missing = {}
    if find_spec("stomp") is not None:
        from bench.client import stomp_py

        title = "receive, each acknowledged by itself, prefetch 1000"
        found.append(Case("stomp.py", title, tasks.receive, "stomp.py", stomp_py.receive, 4, 2, 1, 1000))
    else:
        missing["stomp.py"] = "without stomp.py: it is not installed (the extra demo)"
    title = "truenext.blocking, receive, each acknowledged by itself"
    found.append(Case("blocking-receive", title, threads.receive, "asyncio", tasks.receive, 0.6))
    title = "truenext.blocking, send_many"
    found.append(Case("blocking-send", title, threads.send_many, "asyncio", tasks.send_many, 0.6))
    if reason := _skip_reason(RabbitMQ, no_rabbitmq_reason(), "aio_pika"):
        missing["rabbitmq"] = f"without RabbitMQ: {reason}"
    else:
        found += _rabbitmq_cases()
    if reason := _skip_reason(Nats, no_nats_reason(), "nats"):
        missing["nats"] = f"without NATS: {reason}"
    else:
        found += _nats_cases()
    return found, missing


def _skip_reason(broker: type[Foreign], no_broker: str | None, module: str) -> str:
    no_client = f"{broker.client} is not installed (pip install {broker.client})" if find_spec(module) is None else ""
    return "; ".join(filter(None, (no_broker, no_client)))


def _rabbitmq_cases() -> list[Case]:
    from bench.client import rabbitmq

    prepared = {"classic": rabbitmq.prepare_classic, "quorum": rabbitmq.prepare_quorum}
    return [
        case
        for kind, prepare in prepared.items()
        for case in _broker_cases(
            f"rabbitmq-{kind}",
            f"{kind} queue",
            f"aio-pika on a {kind} queue of RabbitMQ",
            (rabbitmq.send, rabbitmq.receive),
            4,
            PeerSetup(RabbitMQ, prepare, rabbitmq.finish),
        )
    ]


def _nats_cases() -> list[Case]:
    from bench.client import jetstream

    jobs = (jetstream.send, jetstream.receive)
    peer_setup = PeerSetup(Nats, jetstream.prepare, jetstream.finish)
    return _broker_cases("nats", "stream in files", "nats-py on JetStream", jobs, 1, peer_setup)


def _broker_cases(
    key: str, label: str, peer: str, jobs: tuple[Job, Job], target: float, peer_setup: PeerSetup
) -> list[Case]:
    """Return the cases that compare client and broker together."""
    title = f"{label}: send, each message durable and confirmed"
    sending = Case(f"{key}-send", title, tasks.send_many, peer, jobs[0], target, peer_setup=peer_setup)
    title = f"{label}: receive, each acknowledged by itself, prefetch 1000"
    receiving = Case(
        f"{key}-receive", title, tasks.receive, peer, jobs[1], target, prefetch=1000, peer_setup=peer_setup
    )
    return [sending, receiving]


def main(arguments: Sequence[str] | None = None) -> int:
    found, missing = cases()
    parser = argparse.ArgumentParser(
        prog="python -m bench.client", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--messages", type=positive, default=40_000, metavar="N", help="in a run, fewer of what is slow"
    )
    parser.add_argument("--runs", type=positive, default=5, metavar="N")
    keys = ",".join(case.key for case in found)
    parser.add_argument(
        "--only", default=keys, metavar="KEYS", help=f"of {keys}; what stands before a hyphen means all that begin so"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    chosen_keys = options.only.split(",")
    unknown = {each for each in chosen_keys if not any(case.is_one_of([each]) for case in found)}
    if absent := sorted(unknown & missing.keys()):
        parser.error("; ".join(missing[each] for each in absent))
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    chosen = [case for case in found if case.is_one_of(chosen_keys)]
    end_in_order()

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
            for name, value in machine.facts(Path(folder)):
                print_line(f"{name}: {value}")
            with Truenext(Path(folder)) as broker:
                for other, some in groupby(chosen, lambda case: case.peer_setup and case.peer_setup.broker):
                    with nullcontext(broker) if other is None else other(Path(folder)) as peer:
                        if isinstance(peer, Foreign):
                            print_line(f"{peer.name} {peer.version}, {peer.client} {version(peer.client)}")
                            print_line(f"what they promise: {_TRUENEXT_PROMISE}; {peer.promise}")
                        for case in some:
                            messages = max(case.batch, options.messages // case.share // case.batch * case.batch)
                            _compare((broker, peer), case, messages, options.runs)
        for reason in missing.values():
            print_line(reason)

    return guarded(measure)


class _Figures(NamedTuple):
    value: float
    """Messages a second, or the seconds of a round trip."""
    program: float
    """Processor time a message, in microseconds."""
    broker: float


def _compare(brokers: tuple[Broker, Broker], case: Case, messages: int, runs: int) -> None:
    """Measure a case with the broker of the client and that of the peer, which may be the same."""
    print_line(f"{case.key}: {case.title}, {messages:,} messages")
    if case.counts:
        for name, is_client in (("client", True), (case.peer, False)):
            done = _run(
                brokers[0], case, messages, is_client=is_client, name=f"{case.key}.counted.{name}", is_counted=True
            )
            for side, role in zip(done, ("", ", who answers"), strict=False):
                assert side.written is not None, "it was counted"
                print_line(f"  {name}{role}, a message: {side.written.describe(messages)}")
    client_figures: list[_Figures] = []
    peer_figures: list[_Figures] = []
    for number in range(runs):
        for broker, figures, is_client in zip(brokers, (client_figures, peer_figures), (True, False), strict=True):
            before = broker.processor_seconds()
            name = f"{case.key}.{number}.{is_client}"
            first = _run(broker, case, messages, is_client=is_client, name=name)[0]
            used = (broker.processor_seconds() - before) / messages * 1e6
            value = first.trip if case.answers else messages / first.seconds
            figures.append(_Figures(value, first.processor / messages * 1e6, used))
    for name, each in (("client", client_figures), (case.peer, peer_figures)):
        print_line(f"  {name} {_describe(case, each)}")
    ratio = statistics.median(our.value / their.value for our, their in zip(client_figures, peer_figures, strict=True))
    if case.answers:
        print_line(f"  {ratio:.2f} of the round trip of {case.peer} (at most {case.target:g})")
    else:
        print_line(f"  {ratio:.2f} of the rate of {case.peer} (at least {case.target:g})")


def _describe(case: Case, figures: list[_Figures]) -> str:
    value, program, used = (statistics.median(each) for each in zip(*figures, strict=True))
    low, high = min(each.value for each in figures), max(each.value for each in figures)
    spent = f"processor time a message {program:.1f} us, broker {used:.1f} us"
    if case.answers:
        return f"{value * 1e6:,.0f} us ({low * 1e6:,.0f}-{high * 1e6:,.0f}); {spent}"
    return f"{value:,.0f}/s ({low:,.0f}-{high:,.0f}); {spent}"


def _run(
    broker: Broker, case: Case, messages: int, *, is_client: bool, name: str, is_counted: bool = False
) -> list[Done]:
    peer_setup = None if is_client else case.peer_setup
    queue = f"/queue/{name}"
    target = f"{queue}.target"
    order = Order(broker.port, queue, messages, case.batch, target, case.prefetch, is_counted)
    if peer_setup is not None:
        asyncio.run(peer_setup.prepare(broker.port, queue, messages if case.fills else 0))
    elif case.fills:
        with connect(broker.port) as sock:
            send_confirmed(sock, frames.send_groups(queue, True, messages, GROUP, True, 1), 20)
    jobs = [case.job if is_client else case.peer_job]
    if case.answers is not None:
        jobs.append(case.answers[0 if is_client else 1])
    with Crew() as crew:
        workers = [crew.hire(job, order) for job in jobs]
        for worker in workers:
            worker.await_ready()
        # The replying job is hired last, and starts first.
        for worker in reversed(workers):
            worker.start()
        done: list[Done] = crew.finish(SILENCE + messages / 50)
    if peer_setup is not None:
        asyncio.run(peer_setup.finish(broker.port, queue, 0 if case.fills else messages))
    else:
        sent = target if case.key.startswith("copy") else queue if "send" in case.key else None
        asyncio.run(_check(broker.port, sent, messages))
    return done


async def _check(port: int, sent: str | None, messages: int) -> None:
    """Check that only the sent messages wait, and remove them.

    Raises: ValueError
    """
    waiting = await queues.waiting(port)
    expected = {} if sent is None else {sent.removeprefix("/queue/"): messages}
    if waiting != expected:
        raise ValueError(f"these wait: {waiting}, and not {expected}")
    await queues.empty(port, list(waiting))


if __name__ == "__main__":
    raise SystemExit(main())
