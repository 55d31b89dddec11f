"""Tests of the folder in which a broker stores messages if it was given none."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.forked import Forked, completed, completed_text
from truenext.broker.settings import DEFAULT_DATA

LISTEN = ("--listen", "stomp://127.0.0.1:0")


@contextmanager
def serving(folder: Path, options: Sequence[str]) -> Iterator[str]:
    """Run a broker that was called in `folder`, and stop it at the end. Yields its URL."""
    out, log = folder / "out", folder / "log"
    out.unlink(missing_ok=True)
    process = Forked(["serve", *LISTEN, *options], stdout=out, stderr=log, folder=folder)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (out.exists() and out.read_text().endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
        (line,) = out.read_text().splitlines()
        yield line.removeprefix("listening on ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()


def test_broker_without_options_stores_messages_in_its_current_folder_and_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, []) as url:
        assert completed_text("send", "orders", "a book", "--url", url).returncode == 0
    assert "the data folder is ./truenext-data; --data DIR" in (tmp_path / "log").read_text()
    with serving(tmp_path, []) as url:
        assert completed_text("browse", "orders", "--url", url).stdout == "a book\n"
    assert (tmp_path / DEFAULT_DATA / "lock").exists()


@pytest.mark.parametrize(
    ("options", "file"),
    [(["--memory"], ""), (["--data", "mine"], ""), ([], 'data = "mine"'), ([], "memory = true")],
    ids=["memory", "data", "data in a file", "memory in a file"],
)
def test_broker_with_a_choice_makes_no_folder_of_its_own(tmp_path: Path, options: list[str], file: str) -> None:
    (tmp_path / "truenext.toml").write_text(f"[broker]\n{file}\n")
    with serving(tmp_path, [*options, "--config", "truenext.toml"]):
        pass
    assert not (tmp_path / DEFAULT_DATA).exists()
    assert "data folder" not in (tmp_path / "log").read_text()


def test_reload_of_a_file_without_a_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "truenext.toml").write_text("[policy]\nattempts_max = 3\n")
    with serving(tmp_path, ["--config", "truenext.toml"]) as url:
        assert "changes nothing" in completed_text("reload", "--url", url).stdout
        (tmp_path / "truenext.toml").write_text('[broker]\ndata = "mine"\n')
        refused = completed_text("reload", "--url", url)
    assert refused.returncode == 1
    assert 'broker.data cannot change from "truenext-data" to "mine"' in refused.stderr


def test_check_of_a_file_without_a_folder_names_the_default(tmp_path: Path) -> None:
    (tmp_path / "truenext.toml").write_text("")
    done = completed("config", "check", "truenext.toml", folder=tmp_path)
    assert b"`truenext serve` uses ./truenext-data where it is called" in done.stdout
