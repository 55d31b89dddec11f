"""Tests of docs/spark.md against the source and the sink of Spark."""

import re
from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from bench.brokers import free_port
from tests.integration.environments import make_environment, requirements_of_page
from tests.integration.pages import Folder, follow
from tests.unit.test_limits import ANYTHING, all_texts
from truenext.client.core.credentials import NO_CREDENTIALS
from truenext.errors import ConfigurationError
from truenext.spark.sink.options import parse_options as sink_options
from truenext.spark.sink.rows import check_columns
from truenext.spark.source.columns import spark_schema
from truenext.spark.source.options import parse_options

PAGE = "docs/spark.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()
REQUIRED = {"url": "stomp://127.0.0.1:61613", "queue": "orders"}
EXECUTORS = ["truenext", "pyarrow"]
"""Packages that the Python of executors needs, by the page."""

CONF = """
spark.sql.shuffle.partitions     2
spark.sql.codegen.wholeStage     false
spark.sql.codegen.factoryMode    NO_CODEGEN
spark.ui.enabled                 false
spark.driver.host                127.0.0.1
spark.driver.bindAddress         127.0.0.1
"""
"""Settings besides those of all tests: for the tutorial's few rows Java's compilation does not pay."""


def rows(header: str, which: int = 0) -> list[list[str]]:
    """Return the cells of a table with this header: of the first one, or of a later one."""
    table = TEXT.split(f"{header}\n")[1 + which].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:]]


def quoted(text: str) -> list[str]:
    return re.findall("`(.*?)`", text)


OPTIONS = {quoted(name)[0]: (default, meaning) for name, default, meaning in rows("| option | default | meaning |")}


@pytest.mark.alternates("stories")
@pytest.mark.timeout(500)
def test_tutorial_in_the_environments_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf" / "spark-defaults.conf"
    conf.parent.mkdir()
    conf.write_text((Path(__file__).parent / "conf" / conf.name).read_text() + CONF)
    monkeypatch.setenv("SPARK_CONF_DIR", str(conf.parent))
    monkeypatch.setenv("PYSPARK_PYTHON", make_environment(tmp_path / "executors", EXECUTORS))
    python = make_environment(tmp_path / "environment", requirements_of_page(PAGE))
    # On a busy machine a program in Spark takes a minute.
    folder = Folder(tmp_path / "folder", f"stomp://127.0.0.1:{free_port()}", python, patience_s=150)
    try:
        follow(PAGE, folder)
    finally:
        log = folder.path / "spark.log"
        print(log.read_text() if log.exists() else "Spark was not started")


def test_executors_need_what_the_test_gives_them() -> None:
    sentence = " and ".join(f"`{name}`" for name in EXECUTORS)
    assert f"The Python of executors needs {sentence}, and no more." in TEXT


def test_table_of_options_has_the_options_that_there_are() -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_options({"nonsense": ""})
    assert sorted(OPTIONS) == sorted(str(refused.value).partition("the options are ")[2].split(", "))


@pytest.mark.parametrize("name", OPTIONS)
def test_default_of_an_option_is_what_it_is_without_being_said(name: str) -> None:
    default, _ = OPTIONS[name]
    if default == "required":
        with pytest.raises(ConfigurationError, match=f"option {name} is missing"):
            parse_options({other: value for other, value in REQUIRED.items() if other != name})
        return
    said = {} if default == "none" else {name: quoted(default)[0]}
    assert parse_options(REQUIRED | said) == parse_options(REQUIRED)
    assert default == "none" or "must be" in refusal(name, "?"), "the code says a default for it"


def test_option_without_a_default_changes_what_is_read() -> None:
    nothing = [name for name, (default, _) in OPTIONS.items() if default == "none"]
    assert nothing == ["user", "passwordFile", "ca", "certificate", "key", "selector", "minRowsPerTrigger"]
    assert parse_options(REQUIRED).selector is None
    assert parse_options(REQUIRED).credentials == NO_CREDENTIALS


def test_partitions_have_the_range_that_the_page_says() -> None:
    least, most = (int(each) for each in quoted(OPTIONS["partitions"][1])[:2])
    for number in (least, most):
        assert parse_options(REQUIRED | {"partitions": str(number)}).partitions == number
    assert refusal("partitions", str(least - 1)) == refusal("partitions", str(most + 1)).replace(
        str(most + 1), str(least - 1)
    )


def refusal(name: str, value: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        parse_options(REQUIRED | {name: value})
    return str(refused.value)


def test_table_of_columns_has_the_columns_that_there_are_with_their_types() -> None:
    columns = rows("| column | type | meaning |")
    said = {name: quoted(kind)[0] for names, kind, _ in columns for name in quoted(names)}
    assert said.pop("error") == "string"
    schema = spark_schema(parse_options(REQUIRED))
    assert said == {column.name: column.dataType.simpleString() for column in schema}
    assert list(said) == schema.names
    assert spark_schema(parse_options(REQUIRED | {"body": "string"})).names == [*said, "error"]
    assert "headers" not in spark_schema(parse_options(REQUIRED | {"headers": "false"})).names


def test_table_of_the_sinks_options_has_the_options_that_there_are() -> None:
    said = [name for row in rows("| option | default | meaning |", which=2) for name in quoted(row[0])]
    with pytest.raises(ConfigurationError) as refused:
        sink_options({"nonsense": ""}, is_streaming=False)
    assert said == str(refused.value).partition("the options are ")[2].split(", ")
    for name, default in (("space", "main"), ("patience", "600")):
        url = {"url": REQUIRED["url"]}
        assert sink_options({**url, name: default}, is_streaming=True) == sink_options(url, is_streaming=True)
        assert f"| `{name}` | `{default}` |" in TEXT


def test_table_of_the_sinks_columns_has_the_columns_that_there_are() -> None:
    said = [name for row in rows("| column | type | default | meaning |") for name in quoted(row[0])]
    with pytest.raises(ConfigurationError) as refused:
        check_columns(StructType().add("nonsense", "string"), sink_options(REQUIRED, is_streaming=True))
    known = str(refused.value).partition("is unknown; the columns are ")[2].partition(". ")[0]
    assert sorted(said) == sorted(known.split(", "))


@pytest.mark.parametrize(
    "words",
    [
        words
        for which in (0, 1)
        for cell, _ in rows("| error | what to do |", which)
        for words in quoted(cell)
        if "[" not in words and "Spark's own" not in cell
    ],
)
def test_error_that_the_page_explains_is_one_that_the_code_says(words: str) -> None:
    pattern = re.compile(r"\{[^}]*\}".join(map(re.escape, words.split(ANYTHING))))
    assert any(pattern.search(text) for text in all_texts()), f"nobody says {words!r}"
