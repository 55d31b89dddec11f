"""Tests of `truenext stages check` and `describe`, and of commands without a valid service."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.integration.broker_process import BrokerProcess
from truenext.cli.main import main
from truenext.cli.stages.drawing import mermaid_label
from truenext.cli.stages.run import QueueInfo, orphaned_queues
from truenext.stage import Failure, Flow, Service
from truenext.stage.introspection.graph import graph_of
from truenext.stage.introspection.references import references_of

ROOT = Path(__file__).parent.parent.parent

SHOP = """
import msgspec

from truenext.stage import Flow, Service

app = Service("shop")


class Order(msgspec.Struct):
    id: str
    count: int = 1


class Reserve(msgspec.Struct):
    count: int


class Reserved(msgspec.Struct):
    ok: bool


class Placed(msgspec.Struct):
    id: str
    price: int = 0


class Memo(msgspec.Struct):
    id: str = ""


stock = app.remote("stock.reserve", Reserve, Reserved)
news = app.topic("order.news", Placed)
place = app.endpoint("order.place", Order, Placed, state=Memo)


@place.stage
async def check(order: Order, memo: Memo, flow: Flow) -> None:
    flow.request(stock, Reserve(order.count))


@place.stage
async def reserve(answer: Reserved, memo: Memo, flow: Flow) -> Placed:
    flow.send(mail, Placed(memo.id))
    flow.publish(news, Placed(memo.id))
    return Placed(memo.id)


@app.terminator("mail.confirm", Placed)
def mail(placed: Placed) -> None: ...


@app.subscriber(news)
async def note(placed: Placed) -> None: ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with the service, in which the command runs."""
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def stages(*words: str) -> Result:
    return CliRunner().invoke(main, ["stages", *words])


# ---- Which service ----


@pytest.mark.parametrize(
    ("place", "file", "complaint"),
    [
        ("shopp:app", "", "there is no module shopp in {folder}, and none is installed: change to the folder of"),
        ("shop:ap", "", "shop has no ap; its services are shop:app"),
        ("shop:Order", "", "shop:Order is a StructMeta, not a Service; its services are shop:app"),
        (
            "other:app",
            "import nowhere\n",
            "other cannot be imported: No module named 'nowhere' (other.py:1): install it",
        ),
        ("other:app", "app = 1\n", "other:app is a int, not a Service; there is no Service in it"),
        (
            "other:app",
            "from truenext.stage import Service\napp = Service('a b')\n",
            "'a b' is not the name of an endpoint or service: use words of letters, digits, - and _, with dots, such "
            "as order.place (other.py:2)",
        ),
        (
            "other:app",
            "from truenext.stage import Service\napp = Service('a')\napp.endpoint('b', int)\n",
            "b has no stage: decorate a function with its .stage",
        ),
    ],
)
def test_commands_without_a_valid_service_say_why_and_what_to_do(
    folder: Path, place: str, file: str, complaint: str
) -> None:
    (folder / "other.py").write_text(file)
    result = stages("describe", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"truenext: {complaint.format(folder=folder)}")


@pytest.mark.parametrize(
    ("module", "line", "extra"),
    [
        ("sqlalchemy", "from sqlalchemy.ext.asyncio import AsyncSession", "sql"),
        ("aiosqlite", "import aiosqlite", "sql"),
        ("psycopg", "import psycopg", "postgresql"),
        ("opentelemetry", "from truenext.stage.interceptors.tracing import Tracing", "opentelemetry"),
    ],
)
def test_module_of_service_with_missing_extra_names_the_extra(folder: Path, module: str, line: str, extra: str) -> None:
    (folder / "other.py").write_text(f"{line}\n")
    done = without((module,), "stages", "run", "other:app")
    assert done.returncode == 2
    missing = f"truenext: other cannot be imported: No module named '{module}' (other.py:1)"
    assert done.stderr == f"{missing}: pip install 'truenext[{extra}]'\n"


@pytest.mark.parametrize(
    ("module", "url", "extra", "command"),
    [
        *(
            (module, url, extra, command)
            for module, url, extra in (
                ("sqlalchemy", "sqlite:///shop.db", "sql"),
                ("psycopg", "postgresql:///shop", "postgresql"),
            )
            for command in (("outbox",), ("schema", "--apply"), ("run",))
        ),
        ("greenlet", "sqlite:///shop.db", "sql", ("run",)),
    ],
)
def test_command_without_database_driver_says_what_to_install_in_one_line(
    folder: Path, module: str, url: str, extra: str, command: tuple[str, ...]
) -> None:
    (folder / "other.py").write_text(
        "from truenext.stage import Service\n"
        f"app = Service('other', database='{url}', exactly_once=True)\n"
        "@app.terminator('other.take', int)\n"
        "def take(number: int) -> None: ...\n"
    )
    name, *options = command
    done = without((module,), "stages", name, "other:app", *options)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"pip install 'truenext[{extra}]'" in done.stderr


def test_reload_without_its_extra_says_what_to_install(folder: Path) -> None:
    done = without(("watchfiles",), "stages", "run", "shop:app", "--reload")
    assert (done.returncode, done.stderr) == (
        2,
        "truenext: --reload needs watchfiles: pip install 'truenext[reload]'\n",
    )


def without(modules: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that cannot import `modules`."""
    program = (
        "import sys\n"
        f"class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.partition('.')[0] in {modules}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from truenext.cli.main import main\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


def test_file_that_cannot_be_written_is_named_with_the_reason(folder: Path) -> None:
    done = stages("check", "shop:app", "--write", "--against", str(folder / "none" / "file"))
    assert (done.exit_code, done.stderr) == (2, f"truenext: {folder / 'none' / 'file'}: No such file or directory\n")


def test_an_error_in_the_module_is_shown_from_its_own_first_line_on(folder: Path) -> None:
    (folder / "other.py").write_text("def divide():\n    1 / 0\n\n\ndivide()\n")
    result = stages("describe", "other:app")
    assert result.exit_code == 2
    trace, complaint = result.stderr.rstrip().rsplit("\n", 1)
    assert complaint == "truenext: other cannot be imported: ZeroDivisionError: division by zero"
    assert trace.count("  File ") == 2
    assert 'other.py", line 5' in trace


def test_a_service_without_stages_does_not_run(folder: Path) -> None:
    (folder / "other.py").write_text("from truenext.stage import Service\napp = Service('asking')\n")
    result = stages("run", "other:app")
    assert result.exit_code == 2
    assert result.stderr == "truenext: other:app has no stages to run: it only sends to other services\n"


def test_a_file_in_place_of_a_module_is_answered_with_the_module(folder: Path) -> None:
    result = stages("run", "shop.py:app")
    assert (result.exit_code, result.stderr) == (2, "truenext: shop.py is a file, not a module: use shop:app\n")


def test_schema_says_that_printing_and_making_exclude_each_other(folder: Path) -> None:
    result = stages("schema", "shop:app", "--sql", "--apply")
    assert result.exit_code == 2
    assert result.stderr.startswith("truenext: --sql and --apply exclude each other: use one of them; see ")


# ---- check ----


def changed(folder: Path, old: str, new: str) -> Result:
    """Run `check` of the service with a change."""
    assert stages("check", "shop:app", "--against", "shop.json", "--write").exit_code == 0
    assert old in SHOP
    (folder / "changed.py").write_text(SHOP.replace(old, new))
    return stages("check", "changed:app", "--against", "shop.json")


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("count: int = 1", "count: int", "breaks: order.place: its message: `count` is required now"),
        ("count: int = 1", "count: str = ''", "breaks: order.place: its message: `count` was integer, and is string"),
        (
            "    ok: bool",
            "    ok: bool\n    at: int",
            "breaks: order.place.stage.reserve: its message: `at` is required",
        ),
        ('id: str = ""', "id: int = 0", "breaks: order.place: its state: `id` was string, and is integer now"),
        ("async def reserve", "async def book", "breaks: order.place.stage.reserve: the stage is gone"),
        ('"order.place"', '"order.put"', "breaks: order.place: the endpoint is gone"),
        ("price: int = 0", "price: str = ''", "breaks: order.place: its reply: `price` was integer, and may be string"),
        ("price: int = 0", "price: str = ''", "breaks: shop.note: messages of topic order.news: `price` was"),
    ],
)
def test_check_with_breaking_changes_lists_them_and_exits_with_1(
    folder: Path, old: str, new: str, finding: str
) -> None:
    result = changed(folder, old, new)
    assert result.exit_code == 1
    assert any(line.startswith(finding) for line in result.stdout.splitlines()), result.stdout
    # What it breaks, and what to do instead.
    assert all(line.startswith(("breaks: ", "    ", "warning: ")) for line in result.stdout.splitlines()[:-1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count: int = 1", "count: int = 1\n    item: str = ''"),
        ("    count: int = 1\n", ""),
        ("    ok: bool", "    ok: bool = False"),
        ('    id: str = ""', '    id: str = ""\n    count: int = 0'),
        ("@place.stage\nasync def reserve", "@place.stage\nasync def pay(r: Reserved, m: Memo) -> None: ...\n\n\n"
         "@place.stage\nasync def reserve"),
        ("@app.subscriber(news)\nasync def note(placed: Placed) -> None: ...\n", ""),
        ("price: int = 0", "price: int = 0\n    tax: int = 0"),
    ],
)  # fmt: skip
def test_check_without_breaking_changes_exits_with_0(folder: Path, old: str, new: str) -> None:
    result = changed(folder, old, new.replace("order.count", "1"))
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "Nothing breaks shop."), result.stdout
    assert result.stdout.splitlines()[1].startswith("note: shop.json describes the former service")


def test_a_field_of_a_reply_that_may_be_missing_is_a_warning(folder: Path) -> None:
    result = changed(
        folder, "class Placed(msgspec.Struct):\n    id: str\n", "class Placed(msgspec.Struct):\n    id: str = ''\n"
    )
    assert result.exit_code == 0
    assert result.stdout.startswith("warning: order.place: its reply: `id` may be missing now\n")


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        (
            "count: int = 1",
            "number: int = 1",
            "warning: order.place: its message: it has `count` no more, and has `number`",
        ),
        ("price: int = 0", "cost: int = 0", "warning: order.place: its reply: it has `cost` now, instead of `price`"),
    ],
)
def test_a_field_that_was_perhaps_renamed_is_a_warning(folder: Path, old: str, new: str, finding: str) -> None:
    result = changed(folder, old, new)
    assert result.exit_code == 0
    assert any(line.startswith(finding) for line in result.stdout.splitlines()), result.stdout


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        (
            "id: bytes",
            "id: str",
            "breaks: order.place: its message: `id` was bytes in base64, and is read as string now",
        ),
        (
            "id: str, omit_defaults=True\n    count: int = 1",
            "id: str, omit_defaults=True\n    count: int = 2",
            "breaks: order.place: its message: `count` is left out if it is 1, and is read as 2 then",
        ),
    ],
)
def test_check_finds_values_that_are_read_as_something_else(
    folder: Path, before: str, after: str, finding: str
) -> None:
    def shop(text: str) -> str:
        fields, _, option = text.partition(", ")
        option, _, more = option.partition("\n")
        inherits = f"msgspec.Struct, {option}" if option else "msgspec.Struct"
        old = "class Order(msgspec.Struct):\n    id: str\n    count: int = 1\n"
        return SHOP.replace(old, f"class Order({inherits}):\n    {fields}\n{more or '    count: int = 1'}\n")

    (folder / "before.py").write_text(shop(before))
    (folder / "after.py").write_text(shop(after))
    assert stages("check", "before:app", "--against", "shop.json", "--write").exit_code == 0
    result = stages("check", "after:app", "--against", "shop.json")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == [
        finding,
        "    messages that were sent before are read wrongly, without an error",
    ]


def test_the_file_of_another_service_is_warned_of(folder: Path) -> None:
    result = changed(folder, 'Service("shop"', 'Service("store"')
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "warning: store: the file describes another service, shop"


def test_check_writes_the_same_file_each_time_and_only_with_write(folder: Path) -> None:
    first = stages("check", "shop:app", "--against", "a.json", "--write")
    assert first.stdout == "a.json describes shop as it is now.\n"
    written = (folder / "a.json").read_bytes()
    assert stages("check", "shop:app", "--against", "a.json").stdout == "Nothing breaks shop.\n"
    assert stages("check", "shop:app", "--against", "a.json", "--write").exit_code == 0
    assert (folder / "a.json").read_bytes() == written
    facts = json.loads(written)
    assert facts["endpoints"]["order.place"]["stages"].keys() == {"order.place.stage.reserve"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no file a.json: write it with --write, and commit it"),
        ("{", "a.json was not written by --write: "),
        (
            '{"format": 4, "service": "shop", "endpoints": {}}',
            "a.json has format 4, and this truenext knows 3: update truenext",
        ),
        (
            '{"format": 2, "service": "shop", "endpoints": {}}',
            "a.json has format 2, which lacks facts that are compared now: write it anew (--write) "
            "with the code that is deployed, and commit it",
        ),
    ],
)
def test_a_file_that_says_nothing_is_no_answer(folder: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (folder / "a.json").write_text(content)
    result = stages("check", "shop:app", "--against", "a.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"truenext: {complaint}")


def test_a_file_of_an_older_format_is_written_anew(folder: Path) -> None:
    (folder / "a.json").write_text('{"format": 1, "service": "shop", "endpoints": {}}')
    result = stages("check", "shop:app", "--against", "a.json", "--write")
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        ["note: a.json has the older format 1, so nothing was compared.", "a.json describes shop as it is now."],
    )
    assert stages("check", "shop:app", "--against", "a.json").stdout == "Nothing breaks shop.\n"


# ---- describe ----


def test_service_of_the_demo_is_described_as_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [each for each in (ROOT / "README.md").read_text().splitlines() if "stages describe" in each]
    _, *words = line.partition("#")[0].split()
    monkeypatch.chdir(ROOT)
    described = CliRunner().invoke(main, words)
    assert described.exit_code == 0
    assert [each for each in described.stdout.splitlines() if each.startswith("├── ")] == [
        "├── order.place(Order) -> Shipped, state Memo",
        "├── stock.reserve(Reserve) -> Reserved",
    ]


def test_a_service_is_described_as_a_tree() -> None:
    lines = [line.strip("│├└─ \xa0") for line in stages("describe", "shop:app").stdout.splitlines()]
    assert lines == [
        "shop",
        "order.place(Order) -> Placed, state Memo",
        "check(Order) at order.place",
        "requests stock.reserve",
        "reserve(Reserved) at order.place.stage.reserve",
        "sends to mail.confirm",
        "publishes to topic order.news",
        "mail.confirm(Placed)",
        "mail(Placed) at mail.confirm",
        "shop.note(Placed), subscribes to topic order.news",
        "note(Placed)",
        "endpoints of other services",
        "stock.reserve(Reserve) -> Reserved",
        "topics",
        "order.news(Placed)",
    ]


def test_stage_of_on_failure_is_described_after_the_others() -> None:
    service = Service("shop")
    place = service.endpoint("order.place", int)

    @place.stage
    async def check(number: int) -> None: ...

    @place.on_failure
    async def failed(failure: Failure, flow: Flow) -> None:
        flow.goto(one, 1)

    @place.stage
    async def finish(number: int) -> None: ...

    (endpoint,) = graph_of("shop", service.endpoints.values(), [], []).endpoints
    assert [(each.name, each.queue, each.takes) for each in endpoint.stages] == [
        ("check", "order.place", "int"),
        ("finish", "order.place.stage.finish", "int"),
        ("on_failure", "order.place.stage.on_failure", "Failure"),
    ]
    assert [(each.to, each.how) for each in endpoint.stages[2].references] == [(one.name, "goes to")]


def test_a_service_is_described_for_mermaid() -> None:
    assert stages("describe", "shop:app", "--mermaid").stdout.splitlines() == [
        "flowchart LR",
        '  subgraph g0 ["order.place(Order) #45;#62; Placed"]',
        '    n0["check(Order)"]',
        '    n1["reserve(Reserved)"]',
        "  end",
        '  subgraph g1 ["mail.confirm(Placed)"]',
        '    n2["mail(Placed)"]',
        "  end",
        '  subgraph g2 ["shop.note(Placed)"]',
        '    n3["note(Placed)"]',
        "  end",
        '  n4[["stock.reserve(Reserve) #45;#62; Reserved"]]',
        '  n5(["order.news(Placed)"])',
        "  n0 -.-> n1",
        '  n0 -->|"requests"| n4',
        '  n1 -->|"sends to"| n2',
        '  n1 -->|"publishes to"| n5',
        "  n5 --> n3",
    ]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("end", "end"),
        ("dict[str, int] | None", "dict#91;str, int#93; #124; None"),
        ('say "x"; style: #1;', "say #34;x#34;#59; style#58; #35;1#59;"),
        ("<b>&amp;</b>", "#60;b#62;#38;amp#59;#60;#47;b#62;"),
        ("`__a__` *b* %%{c}%%", "#96;#95;#95;a#95;#95;#96; #42;b#42; #37;#37;#123;c#125;#37;#37;"),
        ("Bestellung Größe 注文 ❤", "Bestellung Größe 注文 #10084;"),
        ("reserve(Order)\n2 waiting", "reserve(Order)<br/>2 waiting"),
    ],
)
def test_mermaid_labels_escape_special_characters(text: str, label: str) -> None:
    assert mermaid_label(text) == f'"{label}"'


def test_a_service_is_described_for_graphviz_and_for_programs() -> None:
    dot = stages("describe", "shop:app", "--dot").stdout
    assert dot.startswith('digraph "shop" {')
    assert '"stage order.place check" -> "endpoint stock.reserve" [label="requests"];' in dot
    assert '"topic order.news" -> "stage shop.note note";' in dot
    facts = json.loads(stages("describe", "shop:app", "--json").stdout)
    assert facts["endpoints"][0]["stages"][1]["queue"] == "order.place.stage.reserve"
    assert "queues" not in facts


def test_describe_with_two_formats_is_refused() -> None:
    assert stages("describe", "shop:app", "--dot", "--json").exit_code == 2
    assert stages("describe", "shop:app", "--mermaid", "--dot").exit_code == 2


def test_with_a_broker_it_says_how_many_messages_wait(broker: BrokerProcess) -> None:
    for queue in ("order.place", "order.place", "DLQ.order.place.stage.reserve"):
        broker.output_of("send", queue, "{}")
    url = f"stomp://127.0.0.1:{broker.port}"
    done = stages("describe", "shop:app", "--url", url).stdout
    assert "check(Order) at order.place: 2 waiting" in done
    assert "reserve(Reserved) at order.place.stage.reserve: 0 waiting, 1 dead letter" in done
    queues = json.loads(stages("describe", "shop:app", "--url", url, "--json").stdout)["queues"]
    assert queues["order.place"]["waiting"] == 2
    assert queues["order.place.stage.reserve"]["dead_letters"] == 1


# ---- What a function names ----


app = Service("here")
one = app.remote("one", int, int)
two = app.remote("two", int, int)
many = {"one": one}


def test_references_of_a_function_are_found_with_their_calls() -> None:
    closed_over = app.remote("three", int, int)

    async def asks(flow: object) -> None:
        flow.request(one, 1)  # type: ignore[attr-defined]
        flow.goto(closed_over, 1)  # type: ignore[attr-defined]
        flow.send(sys.modules, one)  # type: ignore[attr-defined]
        [flow.send(two, number) for number in range(3)]  # type: ignore[attr-defined]

    def names() -> object:
        return (lambda: one), two.name

    def has_heading() -> object:
        return many["one"]

    assert references_of(asks) == [(one, "requests"), (closed_over, "goes to"), (two, "sends to")]
    assert references_of(names) == [(one, "names"), (two, "names")]
    # Not all is found.
    assert references_of(has_heading) == []


def test_queue_with_messages_of_a_removed_stage_is_orphaned() -> None:
    service = Service("left")
    first = service.endpoint("left.work", int)

    @first.stage
    async def begin(number: int) -> None: ...

    @first.stage
    async def end(number: int) -> None: ...

    def queue(name: str, waiting: int = 1) -> QueueInfo:
        return QueueInfo(name, waiting, 0, 0)

    removed_queue = queue("left.work.stage.middle")
    others = [
        queue("left.work"),
        queue("left.work.stage.end"),
        queue("left.work.stage.empty", 0),
        queue("other.work.stage.middle"),
        queue("DLQ.left.work.stage.middle"),
    ]
    assert orphaned_queues([removed_queue, *others], service) == [removed_queue]


DAMAGED = [
    pytest.param(
        lambda schema: schema.update({"$ref": "#/$defs/Five", "$defs": {"Five": {"type": "object", "properties": 5}}}),
        id="properties are a number",
    ),
    pytest.param(
        lambda schema: schema.update({"$ref": "#/$defs/Itself", "$defs": {"Itself": {"$ref": "#/$defs/Itself"}}}),
        id="a reference to itself",
    ),
    pytest.param(lambda schema: schema.update({"$ref": "#/$defs/Nothing"}), id="a reference to nothing"),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_file_that_is_damaged_is_no_answer(folder: Path, damage: Callable[[dict[str, Any]], None]) -> None:
    assert stages("check", "shop:app", "--against", "a.json", "--write").exit_code == 0
    written = json.loads((folder / "a.json").read_text())
    for endpoint in written["endpoints"].values():
        damage(endpoint["takes"])
    (folder / "a.json").write_text(json.dumps(written))
    result = stages("check", "shop:app", "--against", "a.json")
    assert result.exit_code == 2
    assert "a.json was not written by --write" in result.stderr


def test_a_module_that_ends_the_program_is_said(folder: Path) -> None:
    (folder / "leaving.py").write_text("import sys\nsys.exit()\n")
    result = stages("run", "leaving:app")
    assert result.exit_code == 2
    assert "it ends the program while it is imported (leaving.py:2)" in result.stderr
