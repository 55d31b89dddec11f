"""Tests of the source's options: each is read, and invalid ones are refused by name, with the valid ones."""

import pytest

from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.errors import ConfigurationError
from truenext.spark.source.options import SourceOptions, parse_options

URL = "stomp://127.0.0.1:61613"


def parsed(**options: str) -> SourceOptions:
    return parse_options({"url": URL, "queue": "orders", **options})


def test_omitted_options_have_their_defaults() -> None:
    options = parsed()
    assert [each.url for each in options.addresses] == [URL]
    assert options.credentials == NO_CREDENTIALS
    assert options.destinations == ("/queue/orders",)
    assert (options.selector, options.partitions, options.space, options.patience_s) == (None, 2, "main", 600.0)
    assert (options.rows_max, options.bytes_max) == (100_000, 256 << 20)
    assert (options.rows_min, options.delay_max_s) == (0, 900.0)
    assert (options.has_text_body, options.has_headers) == (False, True)


def test_options_are_read_with_names_in_any_case() -> None:
    options = parse_options(
        {
            "URL": f"{URL}, stomp://localhost:1",
            "USER": " archive ",
            "passwordfile": " /run/secrets/archive ",
            "CA": " /ca ",
            "Certificate": " /certificate ",
            "key": " /key ",
            "Queue": " /queue/orders.> ",
            "SELECTOR": " colour = 'red' ",
            "partitions": " 64",
            "maxrowspertrigger": "7",
            "maxBytesPerTrigger": "8",
            "maxTriggerDelay": "2h",
            "body": "String",
            "headers": "FALSE",
            "space": "Team_a-1",
            "patience": "0",
        }
    )
    assert [each.url for each in options.addresses] == [URL, "stomp://localhost:1"]
    assert options.credentials == Credentials(
        user="archive", password_file="/run/secrets/archive", ca="/ca", certificate="/certificate", key="/key"
    )
    assert options.queue == "orders.>"
    assert options.delay_max_s == 7200.0
    assert options.selector == "colour = 'red'"
    assert (options.partitions, options.rows_max, options.bytes_max) == (64, 7, 8)
    assert (options.has_text_body, options.has_headers) == (True, False)
    assert (options.space, options.patience_s) == ("Team_a-1", 0.0)


@pytest.mark.parametrize("user", [None, "archive"])
def test_a_certificate_needs_no_password(user: str | None) -> None:
    options = {"certificate": "/c"} if user is None else {"certificate": "/c", "user": user}
    assert parsed(**options).credentials == Credentials(user=user, certificate="/c")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15m", 900), (" 2 Min ", 120), ("500", 0.5), ("500ms", 0.5), ("7us", 7e-6), ("0s", 0), ("1d", 86_400)],
)
def test_a_delay_is_read_as_spark_reads_times(text: str, seconds: float) -> None:
    assert parsed(maxTriggerDelay=text).delay_max_s == pytest.approx(seconds)


def test_several_queues_are_sorted_and_each_is_there_once() -> None:
    options = parsed(queue="returns.>, /queue/orders,orders,,")
    assert (options.queues, options.queue) == (("orders", "returns.>"), "orders,returns.>")
    assert options.destinations == ("/queue/orders", "/queue/returns.>")
    assert [options.is_of(each) for each in ("orders", "returns.new", "returns", "DLQ.orders")] == [
        True,
        True,
        False,
        False,
    ]


def test_an_empty_selector_is_none() -> None:
    assert parsed(selector=" ").selector is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": ""}, 'option url is missing: .option("url", "stomp://127.0.0.1:61613")'),
        ({"url": " , "}, 'option url is missing: .option("url", "stomp://127.0.0.1:61613")'),
        ({"queue": " "}, 'option queue is missing: .option("queue", "orders")'),
        ({"user": "me"}, "options user and passwordFile must be set together"),
        ({"passwordFile": "/file"}, "options user and passwordFile must be set together"),
        ({"user": "me", "passwordFile": " "}, "options user and passwordFile must be set together"),
        ({"passwordFile": "/file", "certificate": "/c"}, "options user and passwordFile must be set together"),
        ({"key": "/key"}, "option key is set without option certificate: set both"),
        ({"user": "a\nb", "passwordFile": "/file"}, "option user: user has a line feed"),
        (
            {"user": "me", "password": "secret"},
            "option password: Spark shows options in its plans of queries; put the password into the first line of a "
            "file, and set the option passwordFile",
        ),
        (
            {"maxRows": "7"},
            "option maxRows is unknown; the options are url, user, passwordFile, ca, certificate, key, queue, "
            "selector, partitions, maxRowsPerTrigger, maxBytesPerTrigger, minRowsPerTrigger, maxTriggerDelay, body, "
            "headers, space, patience",
        ),
        ({"partitions": "0"}, "option partitions is '0', and must be a whole number, 1 to 64"),
        ({"partitions": "65"}, "option partitions is '65', and must be a whole number, 1 to 64"),
        (
            {"maxRowsPerTrigger": "-1"},
            "option maxRowsPerTrigger is '-1', and must be a whole number, 1 to 1099511627776",
        ),
        (
            {"maxBytesPerTrigger": "1m"},
            "option maxBytesPerTrigger is '1m', and must be a whole number, 1 to 1125899906842624",
        ),
        (
            {"minRowsPerTrigger": "100001"},
            "option minRowsPerTrigger is 100001, and must not be above maxRowsPerTrigger, which is 100000",
        ),
        (
            {"minRowsPerTrigger": "2", "selector": "a = 1"},
            "options minRowsPerTrigger and selector are both set, and the broker counts waiting messages regardless of "
            "a selector: leave one out, or let the trigger's processingTime collect messages",
        ),
        *(
            (
                {"maxTriggerDelay": text},
                f"option maxTriggerDelay is {text!r}, and must be a whole number and a unit: us, ms, s, m, min, h, d",
            )
            for text in ("", "soon", "-1s", "1.5m", "1 week")
        ),
        (
            {"option.url": URL, "owner": "me"},
            "CREATE TABLE cannot use truenext: Spark would give its options neither to SELECT nor to INSERT. Use "
            "CREATE TEMPORARY VIEW name USING truenext OPTIONS (...)",
        ),
        ({"patience": "1.5"}, "option patience is '1.5', and must be a whole number, 0 to 31536000"),
        ({"body": "json"}, "option body is 'json', and must be binary or string"),
        ({"headers": "no"}, "option headers is 'no', and must be true or false"),
        ({"space": "a.b"}, "option space is 'a.b', and must be a word of 1 to 64 letters, digits, _ and -"),
        ({"space": ""}, "option space is '', and must be a word of 1 to 64 letters, digits, _ and -"),
        (
            {"queue": "/topic/news"},
            "option queue: /topic/news is a topic, which stores no messages. Send to the topic VirtualTopic.news, and "
            "read the queue Consumer.NAME.VirtualTopic.news, with a NAME of your own",
        ),
        (
            {"queue": "/topic/VirtualTopic.news"},
            "option queue: /topic/VirtualTopic.news is a topic, which stores no messages. Send to the topic "
            "VirtualTopic.news, and read the queue Consumer.NAME.VirtualTopic.news, with a NAME of your own",
        ),
        ({"queue": "/topic/news.>"}, "option queue: /topic/news.> is a topic, which stores no messages. "),
        ({"queue": "/temp-queue/a"}, "option queue: /temp-queue/a is neither a queue nor a pattern of queues"),
        ({"queue": "a,/temp-queue/b"}, "option queue: /temp-queue/b is neither a queue nor a pattern of queues"),
        ({"queue": "orders,Spark.sink.main.1"}, "option queue: Spark.sink.main.1 is reserved for sources and sinks"),
        ({"queue": "a.>.b"}, "option queue: pattern '/queue/a.>.b': > is allowed only as the last word"),
        ({"queue": "queue://a"}, "option queue: unknown destination 'queue://a'"),
        (
            {"queue": "Spark.source.main.1"},
            "option queue: Spark.source.main.1 is reserved for sources and sinks: name a queue of an application",
        ),
        (
            {"queue": "Spark.>"},
            "option queue: Spark.> is reserved for sources and sinks: name a queue of an application",
        ),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_by_its_name(options: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parsed(**options)
    assert str(raised.value).startswith(error)


def test_an_url_that_is_none_is_refused_by_the_name_of_the_option() -> None:
    with pytest.raises(ConfigurationError, match=r"^option url: .*http"):
        parsed(url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("option", "queue", "is_meant"),
    [
        ("orders", "orders", True),
        ("orders", "orders.new", False),
        ("orders.>", "orders.new.eu", True),
        ("orders.*", "orders.new.eu", False),
        (">", "orders", True),
        (">", "DLQ.orders", False),
        ("DLQ.>", "DLQ.orders", True),
        (">", "Spark.source.main.1", False),
        ("*.>", "Spark.source.main.1", False),
        (">", "Consumer.a.VirtualTopic.b", False),
        ("Consumer.>", "Consumer.a.VirtualTopic.b", True),
        # It is called so, and is an ordinary one.
        (">", "Consumer.a", True),
        (">", "subscription,a,b,c", False),
    ],
)
def test_a_pattern_means_the_queues_that_the_contract_says(option: str, queue: str, is_meant: bool) -> None:
    assert parsed(queue=option).is_of(queue) is is_meant
