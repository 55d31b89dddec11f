"""Tests of `truenext --version --json`."""

import json
import platform
from importlib import metadata

import pytest

from tests.integration.forked import completed_text
from truenext.model.events import HISTORY_VERSION
from truenext.stage.sql.tables import VERSION as TABLES_VERSION
from truenext.store.checkpoint_format import FORMAT_VERSION
from truenext.store.postgresql.layout import LAYOUT_VERSION
from truenext.version import VERSION
from truenext.wire.stomp.speedups import CODEC_LANGUAGE


@pytest.mark.parametrize("options", [("--version", "--json"), ("--json", "--version")])
def test_version_as_json_has_python_formats_and_libraries(options: tuple[str, str]) -> None:
    done = completed_text(*options)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert (facts["truenext"], facts["python"], facts["codec"]) == (VERSION, platform.python_version(), CODEC_LANGUAGE)
    assert facts["formats"] == {
        "data_folder": FORMAT_VERSION,
        "history": HISTORY_VERSION,
        "postgresql_log": LAYOUT_VERSION,
        "outbox_tables": TABLES_VERSION,
    }
    libraries = facts["libraries"]
    assert {"click", "lmdb", "sqlalchemy", "psycopg"} <= libraries.keys()
    assert not {"truenext", "pytest", "setuptools", "trustme"} & libraries.keys()
    assert {name: metadata.version(name) for name in libraries} == libraries


def test_json_before_a_command_is_refused() -> None:
    done = completed_text("--json", "queues")
    assert (done.returncode, done.stdout) == (2, "")
    assert "put it after the command" in done.stderr
