"""Tests of this version beside the one before (C30.8).

`make before BEFORE=REVISION` runs them: what is before is a revision of git. In `make test` the program that talks to a
broker of another version talks to one of its own, and what it has said in earlier versions is played.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.foreign.recording import Player
from tests.kept.conversation import EXPECTED, EXPECTED_FURTHER, converse, converse_further

ROOT = Path(__file__).parents[2]
RECORDINGS = sorted((ROOT / "tests/kept").glob("conversation-*.txt"))
REVISION = os.environ.get("TRUENEXT_BEFORE")

needs_before = pytest.mark.skipif(REVISION is None, reason="TRUENEXT_BEFORE names no revision: make before")


@pytest.fixture(scope="session")
def source_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the sources of the version before."""
    folder = tmp_path_factory.mktemp("before")
    packed = subprocess.run(["git", "archive", str(REVISION), "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


def python(source: Path, *arguments: str) -> tuple[list[str], Mapping[str, str]]:
    """Return a command, and its environment, that runs with the sources of a version."""
    paths = os.pathsep.join([str(source), str(ROOT)])
    return [sys.executable, *arguments], {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


def output_of(source: Path, *arguments: str) -> str:
    command, environment = python(source, *arguments)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def broker_of(source: Path, *options: str) -> Iterator[str]:
    """Run a broker with the sources of a version, and yield its URL."""
    serve = ("-m", "truenext", "serve", "--listen", "stomp://127.0.0.1:0", *options)
    command, environment = python(source, *serve)
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _await_url(process.stdout)
        finally:
            process.terminate()
            assert process.wait(60) == 0


def _await_url(output: IO[str] | None) -> str:
    assert output is not None
    line = output.readline()
    assert line.startswith("listening on "), line
    return line.split()[-1]


def test_client_and_broker_of_this_version_find_what_is_expected(broker: BrokerProcess, queue: str) -> None:
    assert list(converse(broker.url, queue)) == EXPECTED
    assert list(converse_further(broker.url, queue)) == EXPECTED_FURTHER


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda each: each.stem)
def test_broker_answers_a_recorded_client_of_an_earlier_version(own_broker: BrokerProcess, recording: Path) -> None:
    """C30.8."""
    Player(own_broker.port, "q", PATIENCE_SECONDS).play(recording.read_text())


@needs_before
def test_client_of_the_version_before_works_with_a_broker_of_this_version(source_before: Path) -> None:
    with broker_of(ROOT / "src", "--memory") as url:
        assert (
            output_of(source_before, "-m", "tests.kept.conversation", url, "q").splitlines()
            == EXPECTED + EXPECTED_FURTHER
        )


@needs_before
def test_client_of_this_version_works_with_a_broker_of_the_version_before(source_before: Path) -> None:
    with broker_of(source_before, "--memory") as url:
        assert (
            output_of(ROOT / "src", "-m", "tests.kept.conversation", url, "q").splitlines()
            == EXPECTED + EXPECTED_FURTHER
        )
        assert json.loads(output_of(ROOT / "src", "-m", "truenext", "queues", "--url", url, "--json")) is not None


@needs_before
def test_broker_of_this_version_goes_on_with_a_folder_of_the_version_before(
    source_before: Path, tmp_path: Path
) -> None:
    """C30.2."""
    data = str(tmp_path / "data")
    with broker_of(source_before, "--data", data) as url:
        output_of(source_before, "-m", "truenext", "send", "kept", "a message", "--url", url)
    with broker_of(ROOT / "src", "--data", data) as url:
        assert "a message" in output_of(ROOT / "src", "-m", "truenext", "receive", "kept", "--url", url)


@needs_before
def test_processes_of_both_versions_share_the_outbox(source_before: Path, tmp_path: Path) -> None:
    """C30.8, C30.9: each version sends and handles what the other has written."""
    database = f"sqlite:///{tmp_path}/service.db"
    schema = ("-m", "truenext", "stages", "schema", "tests.kept.service:app", "--database", database, "--apply")
    output_of(source_before, *schema)
    output_of(ROOT / "src", *schema)
    for broker, initiating, running in (
        (source_before, source_before, ROOT / "src"),
        (source_before, ROOT / "src", source_before),
        (ROOT / "src", source_before, ROOT / "src"),
        (ROOT / "src", ROOT / "src", source_before),
    ):
        with broker_of(broker, "--memory") as url:
            output_of(initiating, "-m", "tests.kept.flows", "initiate", database, url)
            assert output_of(running, "-m", "tests.kept.flows", "run", database, url) == "an order was shipped\n"


@needs_before
def test_processes_of_the_version_before_do_not_answer(source_before: Path) -> None:
    """C30.8, C34.1."""
    with broker_of(ROOT / "src", "--memory") as url:
        run = ("-m", "truenext", "stages", "run", "tests.stages.services.poisoned:app", "--url", url)
        for source, answers in ((source_before, 0), (ROOT / "src", 1)):
            command, environment = python(source, *run)
            with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None and "poisoned runs" in process.stdout.readline()
                output = output_of(ROOT / "src", "-m", "truenext", "stages", "ps", "--url", url, "--json")
                assert len(json.loads(output)) == answers
                process.terminate()
                assert process.wait(60) == 0
