"""Tests of the process of a service: its start, its stop with messages in progress, and its output."""

import asyncio
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.brokers import free_port
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import completed
from tests.prometheus_samples import parse
from tests.stages.service_process import ServiceProcess
from tests.stages.services.job import Job
from tests.stages.services.working import blocking, never, slow, stubborn
from truenext.stage import Endpoint, Service

SERVICE = "tests.stages.services.working:app"
Start = Callable[..., ServiceProcess]
BY_SIGNAL = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit statuses after two signals: either of two simultaneous signals may be the second."""


@pytest.fixture
def start(tmp_path: Path, broker: BrokerProcess) -> Iterator[Start]:
    """Function that starts a process of the service; with `up` it waits until the process consumes messages."""
    processes: list[ServiceProcess] = []

    def start(*options: str, up: bool = True) -> ServiceProcess:
        process = ServiceProcess(tmp_path, SERVICE, url_of(broker), *options)
        processes.append(process)
        if up:
            process.await_lines("work runs ")
        return process

    yield start
    for process in processes:
        process.kill()


def url_of(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


def start_flows(broker: BrokerProcess, endpoint: Endpoint[Job, None], numbers: range) -> None:
    """Initiate flows of the service from another program."""

    async def send() -> None:
        other = Service("other", broker=url_of(broker))
        async with other.connected(), other.initiate() as flows:
            for number in numbers:
                flows.send(endpoint, Job(number), trace=f"job {number}")

    asyncio.run(send())


def numbers(process: ServiceProcess, what: str) -> Counter[str]:
    return Counter(line.removeprefix(what) for line in process.lines(what))


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("redirection", "status", "printed"),
    [
        ("| true", 141, ""),
        (">/dev/full", 2, "truenext: cannot write to standard output: No space left on device\n"),
        (">&-", 2, "truenext: cannot write to standard output: it is closed, or open for reading only\n"),
    ],
    ids=["pipe", "full", "closed"],
)
def test_service_whose_standard_output_takes_nothing_ends_as_other_commands_do(
    broker: BrokerProcess, redirection: str, status: int, printed: str
) -> None:
    # The reader has gone before anything is written.
    shell = f'{{ sleep 0.1; "$@"; echo "status $?" >&2; }} {redirection}'
    command = ["/bin/sh", "-c", shell, "sh", TRUENEXT, "stages", "run", SERVICE, "--url", url_of(broker)]
    done = subprocess.run(dying_with_us(command), stderr=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS)
    assert done.stderr == f"{printed}status {status}\n"


def test_output_of_a_stage_is_in_the_file_while_the_service_runs(broker: BrokerProcess, start: Start) -> None:
    process = start()
    start_flows(broker, never, range(1))
    process.await_lines("begun 0")
    assert not process.has_ended


def run_without_a_broker(folder: Path, program: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program without a broker, which must end before it would wait for one."""
    (folder / "lonely.py").write_text(program)
    url = f"stomp://127.0.0.1:{free_port()}"
    return completed("stages", "run", "lonely:app", "--url", url, folder=folder)


def test_a_service_whose_tables_are_missing_says_so_though_no_broker_is_there(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/lonely.db"
    (tmp_path / "lonely.db").touch()
    done = run_without_a_broker(
        tmp_path,
        f"""
from truenext.stage import Service

app = Service("lonely", database={database!r}, exactly_once=True)

@app.terminator("lonely.take", int)
async def take(number: int) -> None: ...
""",
    )
    assert (done.returncode, b"truenext stages schema" in done.stderr) == (2, True), done.stderr.decode()


def test_a_folder_for_events_that_cannot_be_made_is_said_though_no_broker_is_there(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    done = run_without_a_broker(
        tmp_path,
        """
from truenext.stage import Service

app = Service("lonely", events="events/of/stages")

@app.terminator("lonely.take", int)
async def take(number: int) -> None: ...
""",
    )
    assert (done.returncode, b"cannot be written to" in done.stderr) == (2, True), done.stderr.decode()


@pytest.mark.parametrize(
    ("call", "is_printed"), [("basicConfig(level='DEBUG')", True), ("basicConfig(force=True)", False)]
)
def test_a_module_whose_basic_config_has_no_effect_is_told_so(tmp_path: Path, call: str, is_printed: bool) -> None:
    done = run_without_a_broker(
        tmp_path,
        f"""
import logging

from truenext.stage import Service

logging.{call}
app = Service("lonely", events="lonely.py/events")

@app.terminator("lonely.take", int)
async def take(number: int) -> None: ...
""",
    )
    assert done.returncode == 2
    assert (b"logging.basicConfig has no effect" in done.stderr) is is_printed, done.stderr.decode()
    assert (b"place='lonely.py:6'" in done.stderr) is is_printed


def test_on_sigterm_a_service_finishes_what_it_has_and_others_do_the_rest(broker: BrokerProcess, start: Start) -> None:
    first, second = start(), start()
    start_flows(broker, slow, range(8))
    first.await_lines("begun ", 2)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert numbers(first, "slept ") == numbers(first, "begun ")
    second.await_lines("begun ", 3)
    second.signal(signal.SIGINT)
    assert second.wait() == 0
    third = start()
    broker.await_facts("work.slow", waiting=0, unacknowledged=0)
    broker.await_facts("work.slow.stage.finish", waiting=0, unacknowledged=0)
    third.signal(signal.SIGTERM)
    assert third.wait() == 0
    # Each once, and each by its first attempt: nobody was charged.
    started = numbers(first, "begun ") + numbers(second, "begun ") + numbers(third, "begun ")
    done = numbers(first, "done ") + numbers(second, "done ") + numbers(third, "done ")
    assert started == done == Counter(f"{number} 1" for number in range(8))


def test_on_a_second_signal_a_service_gives_back_what_it_has_at_once(broker: BrokerProcess, start: Start) -> None:
    first = start()
    start_flows(broker, slow, range(2))
    start_flows(broker, never, range(2, 3))
    first.await_lines("begun ", 3)
    # Two of a kind may be one.
    first.signal(signal.SIGTERM)
    first.signal(signal.SIGINT)
    assert first.wait() in BY_SIGNAL
    assert "the process ends without waiting for functions that do not" in first.log
    broker.await_facts("work.slow", waiting=2, unacknowledged=0)
    second = start()
    # By the first attempt again.
    assert set(second.await_lines("begun ", 3)) == {"begun 0 1", "begun 1 1", "begun 2 1"}


def test_a_service_ends_though_a_stage_swallows_its_cancellation_and_gives_its_message_back(
    broker: BrokerProcess, start: Start
) -> None:
    process = start()
    start_flows(broker, stubborn, range(1))
    process.await_lines("begun ")
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGINT)
    assert process.wait(40) in BY_SIGNAL
    assert "the process ends without waiting for stages that do not" in process.log
    (printed,) = process.lines("stages are still running")
    assert printed.endswith(" stages=['work.stubborn']")
    broker.await_facts("work.stubborn", waiting=1, unacknowledged=0)
    second = start()
    second.await_lines("begun 0 1")


def test_a_service_ends_though_a_stage_blocks_its_event_loop(broker: BrokerProcess, start: Start) -> None:
    process = start()
    start_flows(broker, blocking, range(1))
    process.await_lines("begun ")
    started_at = time.monotonic()
    process.signal(signal.SIGTERM)
    # One that comes while the first is on its way may go to another thread, and then nobody interrupts the sleep.
    time.sleep(1)
    process.signal(signal.SIGINT)
    assert process.wait(35) in BY_SIGNAL
    assert time.monotonic() - started_at > 9
    broker.await_facts("work.blocking", waiting=1, unacknowledged=0)


def test_a_service_waits_for_its_broker_and_says_how_it_is(broker: BrokerProcess, start: Start) -> None:
    port = free_port()
    broker.kill()
    process = start("--health", str(port), up=False)
    process.await_lines("cannot connect")
    assert get(port, "/live")[0] == 200
    status, printed = get(port, "/ready")
    assert status == 503
    assert json.loads(printed)["reasons"] == ["it is waiting for the broker"]
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_service_that_runs_says_how_its_stages_are(broker: BrokerProcess, start: Start) -> None:
    process = start("--health", "0")
    (line,) = process.await_lines("work runs ")
    assert line.startswith(f"work runs 5 stages of 4 endpoints at {url_of(broker)}; health at http://127.0.0.1:")
    port = int(line.rpartition(":")[2])
    start_flows(broker, never, range(1))
    process.await_lines("begun ")
    # Its other stages may subscribe a moment later.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (answer := get(port, "/ready"))[0] != 200:
        assert time.monotonic() < deadline, answer
        time.sleep(0.005)
    printed = answer[1]
    busy = {(each["stage"], each["pool"]): each["active"] for each in json.loads(printed)["stages"]}
    assert busy.pop(("work.never", "other")) == 1
    assert set(busy.values()) == {0}
    samples = parse(get(port, "/metrics")[1])
    assert samples['truenext_stage_running{endpoint="work.never",pool="other",stage="never"}'] == 1
    broker.kill()
    process.await_lines("connection lost")
    assert get(port, "/ready")[0] == 503
    assert get(port, "/live")[0] == 200


def test_a_stage_that_ends_no_message_is_not_live(broker: BrokerProcess, start: Start) -> None:
    process = start("--health", "0", "--stalled-after", "0.001")
    port = int(process.await_lines("work runs ")[0].rpartition(":")[2])
    assert get(port, "/live")[0] == 200
    start_flows(broker, never, range(1))
    process.await_lines("begun ")
    status, printed = get(port, "/live")
    assert status == 503
    assert "work.never has 1 other message in progress" in printed


def test_messages_of_a_stage_that_is_no_more_are_told_at_the_start(broker: BrokerProcess, start: Start) -> None:
    broker.output_of("send", "work.slow.stage.former", "{}")
    broker.output_of("send", "other.stage.former", "{}")
    process = start()
    assert (
        "queue='work.slow.stage.former' messages=1 consumers=0"
        in process.await_lines("a stage that does not exist any more")[0]
    )
    assert "other.stage.former" not in process.log
