"""How fast is truenext's own client?

Beside raw sockets, which write the same frames in as many writes and do nothing else; beside stomp.py; and
truenext.blocking beside asyncio. Bodies of 1 KiB, persistent messages (but for requests), one client and one broker,
each a process of its own. The client and its peer take turns; the ratio is the median of those of each pair of runs.
Queues are filled before the clock starts. It stops when the broker has confirmed that the client has taken leave, and
so all that the client has said before.

python -m bench.client --only receive,copy-10 --runs 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import truenext
from bench import frames, machine
from bench.brokers import Broker, Truenext
from bench.client import raw, tasks, threads
from bench.client.work import Done, Order
from bench.load import GROUP, SILENCE, connect, send_confirmed
from bench.options import positive
from bench.progress import guarded, say
from bench.workers import Crew, Job, end_in_order


class Case(NamedTuple):
    key: str
    title: str
    ours: Job
    peer: str
    theirs: Job
    target: float
    """Of the rate of the peer, at least; of its round trip, at most."""
    share: int = 1
    """This part of the messages."""
    batch: int = 1
    prefetch: int | None = None
    answers: tuple[Job, Job] | None = None
    """Those that answer, of the client and of the peer: round trips are measured."""

    @property
    def fills(self) -> bool:
        return self.answers is None and "send" not in self.key

    @property
    def counts(self) -> bool:
        """Both write the same, and it is to be seen."""
        return self.peer == "raw"


def cases() -> tuple[list[Case], list[str]]:
    """Those that can be measured here; and why others cannot."""
    found = [
        Case("receive", "receive, each acknowledged by itself", tasks.receive, "raw", raw.receive, 0.6),
        Case("auto", "receive, auto", tasks.iterate, "raw", raw.iterate, 0.6),
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
    missing = []
    if find_spec("stomp") is not None:
        from bench.client import stomp_py

        title = "receive, each acknowledged by itself, prefetch 1000"
        found.append(Case("stomp.py", title, tasks.receive, "stomp.py", stomp_py.receive, 4, 2, 1, 1000))
    else:
        missing.append("without stomp.py: it is not installed (the extra demo)")
    title = "truenext.blocking, receive, each acknowledged by itself"
    found.append(Case("blocking-receive", title, threads.receive, "asyncio", tasks.receive, 0.6))
    title = "truenext.blocking, send_many"
    found.append(Case("blocking-send", title, threads.send_many, "asyncio", tasks.send_many, 0.6))
    return found, missing


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
    parser.add_argument("--only", default=keys, metavar="KEYS", help=f"of {keys}")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - {case.key for case in found}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    end_in_order()

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
            for name, value in machine.facts(Path(folder)):
                say(f"{name}: {value}")
            with Truenext(Path(folder)) as broker:
                for case in found:
                    if case.key in wanted:
                        messages = max(case.batch, options.messages // case.share // case.batch * case.batch)
                        _compare(broker, case, messages, options.runs)
        for reason in missing:
            say(reason)

    return guarded(measure)


class _Figures(NamedTuple):
    value: float
    """Messages a second, or the seconds of a round trip."""
    own: float
    """Processor time a message, in microseconds."""
    broker: float


def _compare(broker: Broker, case: Case, messages: int, runs: int) -> None:
    say(f"{case.key}: {case.title}, {messages:,} messages")
    if case.counts:
        for name, is_ours in (("client", True), (case.peer, False)):
            done = _run(broker, case, messages, is_ours=is_ours, name=f"{case.key}.counted.{name}", is_counted=True)
            for side, role in zip(done, ("", ", who answers"), strict=False):
                assert side.written is not None, "it was counted"
                say(f"  {name}{role}, a message: {side.written.told(messages)}")
    ours: list[_Figures] = []
    theirs: list[_Figures] = []
    for number in range(runs):
        for figures, is_ours in ((ours, True), (theirs, False)):
            before = broker.processor_seconds()
            name = f"{case.key}.{number}.{is_ours}"
            first = _run(broker, case, messages, is_ours=is_ours, name=name)[0]
            used = (broker.processor_seconds() - before) / messages * 1e6
            value = first.trip if case.answers else messages / first.seconds
            figures.append(_Figures(value, first.processor / messages * 1e6, used))
    for name, each in (("client", ours), (case.peer, theirs)):
        say(f"  {name} {_told(case, each)}")
    ratio = statistics.median(our.value / their.value for our, their in zip(ours, theirs, strict=True))
    if case.answers:
        say(f"  {ratio:.2f} of the round trip of {case.peer} (at most {case.target:g})")
    else:
        say(f"  {ratio:.2f} of the rate of {case.peer} (at least {case.target:g})")


def _told(case: Case, figures: list[_Figures]) -> str:
    value, own, used = (statistics.median(each) for each in zip(*figures, strict=True))
    low, high = min(each.value for each in figures), max(each.value for each in figures)
    spent = f"processor time a message {own:.1f} us, broker {used:.1f} us"
    if case.answers:
        return f"{value * 1e6:,.0f} us ({low * 1e6:,.0f}-{high * 1e6:,.0f}); {spent}"
    return f"{value:,.0f}/s ({low:,.0f}-{high:,.0f}); {spent}"


def _run(
    broker: Broker, case: Case, messages: int, *, is_ours: bool, name: str, is_counted: bool = False
) -> list[Done]:
    queue = f"/queue/{name}"
    target = f"{queue}.target"
    order = Order(broker.port, queue, messages, case.batch, target, case.prefetch, is_counted)
    if case.fills:
        with connect(broker.port) as sock:
            send_confirmed(sock, frames.send_groups(queue, True, messages, GROUP, True, 1), 20)
    jobs = [case.ours if is_ours else case.theirs]
    if case.answers is not None:
        jobs.append(case.answers[0 if is_ours else 1])
    with Crew() as crew:
        workers = [crew.hire(job, order) for job in jobs]
        for worker in workers:
            worker.await_ready()
        # Who answers comes first.
        for worker in reversed(workers):
            worker.go()
        done: list[Done] = crew.finish(SILENCE + messages / 50)
    sent = {"copy": target, "send": queue}.get(case.key.rpartition("blocking-")[2].partition("-")[0])
    asyncio.run(_check(broker.port, sent, messages))
    return done


async def _check(port: int, sent: str | None, messages: int) -> None:
    """Nothing waits any more but what was sent, which is removed.

    Raises: ValueError
    """
    async with truenext.connect(f"stomp://127.0.0.1:{port}") as connection:
        found = {each["name"]: each["waiting"] for each in json.loads(await connection.ask("queues"))}
        left = {name: waiting for name, waiting in found.items() if waiting}
        expected = {} if sent is None else {sent.removeprefix("/queue/"): messages}
        if left != expected:
            raise ValueError(f"these wait: {left}, and not {expected}")
        for name in left:
            question: dict[str, object] = {"queue": name}
            while True:
                answer = json.loads(await connection.ask("purge", question))
                if answer["next"] is None:
                    break
                question |= {"after": answer["next"], "until": answer["until"]}


if __name__ == "__main__":
    raise SystemExit(main())
