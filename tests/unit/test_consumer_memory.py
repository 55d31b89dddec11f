"""Tests that the memory of subscriptions, selectors and long names is counted, freed and limited."""

import gc
import re
import tracemalloc
from collections.abc import Callable
from weakref import ref

import pytest

from tests.drawing import one_of
from tests.unit.test_unused_queues import Passing
from truenext.engine.state import memory as memory_module
from truenext.engine.state.memory import CONSUMER_BYTES, JOIN_BYTES, WILDCARD_BYTES
from truenext.engine.state.wildcard import Wildcard
from truenext.errors import RemoteProtocolError
from truenext.model import selector as selector_module
from truenext.model.commands import AckMode, Browse, Subscribe, Unsubscribe
from truenext.model.destination import durable_key, parse_address
from truenext.model.limits import JOIN_QUEUES_PER_TURN, SELECTOR_CACHE_BYTES, SELECTOR_LENGTH_MAX, SELECTOR_PARTS_MAX
from truenext.model.selector import Selector, compile_selector

KEY = durable_key("client", "reader")


def long_selector(number: int = 0) -> Selector:
    """Return a selector of hundreds of KiB; each number gives another one."""
    # Each condition has four parts and a %, and these of LIKE take the most memory for them.
    conditions = [f"n{count} like '%x_y'" for count in range(SELECTOR_PARTS_MAX // 5 - 1)]
    return compile_selector(" or ".join([f"n = {number}", *conditions]))


def subscribe(
    run: Passing, address: str, selector: Selector | None = None, *, name: str = "1", durable: str = ""
) -> None:
    subscribed = Subscribe(
        name, parse_address(address, "s"), AckMode.INDIVIDUAL, 1, durable_key=durable, selector=selector
    )
    run.engine.commands.subscribe(run.session, subscribed)
    run.settle()


@pytest.mark.parametrize("address", ["/queue/q", "/queue/*", "/topic/t", "/topic/t.*"])
@pytest.mark.parametrize("is_disconnect", [False, True])
def test_a_subscription_takes_its_selector_s_memory_and_gives_it_back(address: str, is_disconnect: bool) -> None:
    run = Passing()
    run.publish("q")
    before = run.engine.state.memory.queue_bytes
    selector = long_selector()
    subscribe(run, address, selector)
    assert run.engine.state.memory.queue_bytes > before + selector.size + CONSUMER_BYTES > before + 300_000
    if is_disconnect:
        run.engine.commands.disconnect(run.session, is_exempt=True)
    else:
        run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.settle()
    assert run.engine.state.memory.queue_bytes == before


def test_a_selector_that_many_have_is_there_and_counted_once() -> None:
    # C8.8
    run = Passing()
    selector = long_selector()
    subscribe(run, "/queue/a", selector, name="a")
    before = run.engine.state.memory.queue_bytes
    text = selector.text
    del selector
    subscribe(run, "/queue/b", long_selector(), name="b")
    subscribe(run, "/topic/t", long_selector(), name="t")
    assert run.engine.state.memory.queue_bytes < before + 10_000
    for name in ("a", "b"):
        run.engine.commands.unsubscribe(run.session, Unsubscribe(name))
    assert run.engine.state.memory.selector_use_counts == {compile_selector(text): 2}, (
        "its subscriber has it, and what is copied to its queue"
    )


def test_selector_of_an_unused_durable_subscription_is_counted_also_after_a_restart() -> None:
    run = Passing()
    before = run.engine.state.memory.queue_bytes
    selector = long_selector()
    subscribe(run, "/topic/t", selector, durable=KEY)
    run.engine.commands.disconnect(run.session, is_exempt=True)
    run.settle()
    assert run.engine.state.memory.queue_bytes > before + selector.size
    run.start_engine()
    assert run.engine.state.memory.queue_bytes > before + selector.size
    run.engine.commands.unsubscribe(run.session, Unsubscribe("other", durable_key=KEY))
    run.settle()
    assert run.engine.state.memory.queue_bytes == before and not run.engine.state.memory.selector_use_counts


def test_a_browser_takes_memory_until_it_ends_though_it_was_shown_all() -> None:
    run = Passing()
    run.publish("q")
    before = run.engine.state.memory.queue_bytes
    selector = long_selector()
    run.engine.commands.browse(run.session, Browse("1", parse_address("/queue/q", "s"), selector))
    run.settle()
    assert run.engine.state.memory.queue_bytes == before + selector.size + memory_module.consumer_size(
        "1", parse_address("/queue/q", "s")
    )
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    assert run.engine.state.memory.queue_bytes == before


@pytest.mark.parametrize("address", ["/queue/q", "/queue/*", "/topic/t", "durable"])
def test_a_selector_for_which_there_is_no_room_is_refused_and_nothing_is_done(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C8.8
    monkeypatch.setattr(memory_module, "CONSUMERS_RESERVE", 100_000)
    run = Passing(capacity=10)
    run.publish("q")
    run.settle()
    before, names = run.engine.state.memory.queue_bytes, {queue.name for queue in run.engine.queues.by_name.values()}
    durable = KEY if address == "durable" else ""
    with pytest.raises(
        RemoteProtocolError, match=r"no memory for this subscription: it needs 3[01]\d KiB .*--memory-limit"
    ):
        subscribe(run, "/topic/t" if durable else address, long_selector(), durable=durable)
    with pytest.raises(RemoteProtocolError, match="no memory for this subscription"):
        run.engine.commands.browse(run.session, Browse("b", parse_address("/queue/q", "s"), long_selector()))
    assert (
        run.engine.state.memory.queue_bytes == before
        and {queue.name for queue in run.engine.queues.by_name.values()} == names
    )
    assert not run.session.consumers and not run.session.browsers
    subscribe(run, "/queue/q", compile_selector("n = 1"))


def test_full_memory_of_queues_leaves_a_reserve_for_consumers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C8.8
    monkeypatch.setattr(memory_module, "CONSUMERS_RESERVE", 20 * CONSUMER_BYTES)
    run = Passing(capacity=10)
    for number in range(10):
        run.publish(f"q{number}")
    with pytest.raises(RemoteProtocolError, match="no memory for another queue"):
        run.publish("one more")
    subscribe(run, "/queue/>", name="first")
    assert len(run.session.consumers["first"].all_queues()) == 10, "nobody is refused who makes room"
    count = 0
    with pytest.raises(RemoteProtocolError, match="no memory for this subscription"):
        for count in range(100):
            subscribe(run, "/queue/q0", name=f"consumer {count}")
    assert 8 < count < 20
    run.engine.commands.unsubscribe(run.session, Unsubscribe("consumer 0"))
    subscribe(run, "/queue/q0", name="another")


def test_first_pattern_of_a_queue_is_never_refused_and_later_ones_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    # C8.8
    monkeypatch.setattr(memory_module, "CONSUMERS_RESERVE", 20 * CONSUMER_BYTES)
    run = Passing(capacity=100)
    for number in range(100):
        run.publish(f"{'ab'[number % 2]}.{number}")
    before = run.engine.state.memory.queue_bytes
    subscribe(run, "/queue/a.*", name="a")
    subscribe(run, "/queue/b.*", name="b")
    assert run.engine.state.memory.queue_bytes < before + 2 * (CONSUMER_BYTES + WILDCARD_BYTES) + 500, (
        "queues have room for it"
    )
    with pytest.raises(RemoteProtocolError, match="no memory for this subscription"):
        subscribe(run, "/queue/>", name="all")


def test_memory_of_a_wildcard_consumer_is_counted_once_while_it_joins() -> None:
    run = Passing()
    for number in range(5 * JOIN_QUEUES_PER_TURN):
        run.publish(f"q{number}")
    before, counted = run.engine.state.memory.queue_bytes, []
    subscribed = Subscribe(
        "1", parse_address("/queue/>", "s"), AckMode.INDIVIDUAL, 1, selector=compile_selector("x = 1")
    )
    run.engine.commands.subscribe(run.session, subscribed)
    consumer = run.session.consumers["1"]
    assert isinstance(consumer, Wildcard)
    while consumer.is_joining:
        counted.append(run.engine.state.memory.queue_bytes - before)
        run.engine.turn.run()
    run.settle()
    at_last = run.engine.state.memory.queue_bytes - before
    assert len(counted) == 4 and all(0.99 * at_last < each < 1.01 * at_last for each in counted)


LISTS = {
    "numbers": "n = 1 or n = 2.5 or n <> 3e4",
    "texts": "colour = 'red' or size = 'large' or JMSType = 'order'",
    "a list": "colour in ('red', 'green', 'blue', 'a longer text')",
    "pieces": "name like '%a%b%c_d%'",
    "arithmetic": "a + b * c - d / 2 > -e",
    "between": "n between 1 and 2 and not (m is null or l not between 3 and 4)",
    "a long text": f"name = '{'é' * 400}'",
}


@pytest.mark.parametrize("kind", LISTS)
def test_size_of_a_selector_is_the_memory_it_uses(kind: str) -> None:
    for times in (1, 5, 20):
        text = " and ".join([f"({LISTS[kind]})"] * times)[: SELECTOR_LENGTH_MAX - 1]
        text = text if text.endswith(")") else text[: text.rindex(" and (")]
        selector_module._compile(text)
        re.purge()
        gc.collect()
        tracemalloc.start()
        try:
            compiled = selector_module._compile(str(text.encode(), "utf-8"))
            re.purge()
            gc.collect()
            used = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert 0.9 * used - 1000 < compiled.size < 1.15 * used + 1000


def test_last_few_unused_selectors_are_kept() -> None:
    known = [ref(long_selector(number)) for number in range(8)]
    kept = [one() for one in known]
    assert kept[0] is None and kept[-1] is not None
    assert sum(one.size for one in kept if one is not None) <= SELECTOR_CACHE_BYTES


def test_memory_of_a_long_name_is_counted_with_its_queue_and_freed() -> None:
    run = Passing()
    before = run.engine.state.memory.queue_bytes
    run.use("short")
    short = run.engine.state.memory.queue_bytes - before
    run.use("長" * 250)
    assert run.engine.state.memory.queue_bytes - before - short > short + 3 * 250
    run.advance(70)
    assert run.engine.state.memory.queue_bytes == before


def traced(run: Passing, act: Callable[[], object]) -> tuple[int, int]:
    """Bytes that something takes, and as how many it is counted."""
    gc.collect()
    before = run.engine.state.memory.queue_bytes
    tracemalloc.start()
    try:
        act()
        re.purge()
        parse_address.cache_clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], run.engine.state.memory.queue_bytes - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("texts", [1, 8, 9, 300])
def test_memory_of_a_selector_list_in_each_queue_of_a_pattern_is_counted(texts: int) -> None:
    """Fixed: five lists of 550 over 2000 queues took 1.4 GiB, and were counted as 20 MiB."""
    run = Passing()
    for number in range(300):
        run.publish(f"q{number}")
    run.settle()
    selector = compile_selector("x in (" + ",".join(f"'{number}'" for number in range(texts)) + ")")
    used, counted = traced(run, lambda: subscribe(run, "/queue/>", selector))
    assert used < counted + 300 * JOIN_BYTES + 100_000
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.settle()
    assert not run.engine.state.memory.selector_use_counts


@pytest.mark.parametrize("address", ["/queue/{}.*", "/topic/{}.*", "/topic/{}", "/queue/{}"])
@one_of("name", ["a", "a" * 200, "長" * 200, "😀" * 200], ids=["short", "long", "2 bytes", "4 bytes"])
def test_memory_of_a_subscription_is_counted_for_each_kind_of_address(address: str, name: str) -> None:
    """Fixed: patterns of queues of which there are none were counted as 700 bytes, and took up to 9 KiB."""
    run = Passing()
    many = 300

    def subscribe_to_all() -> None:
        for number in range(many):
            subscribe(run, address.format(f"{name}{number}"), name=str(number))

    used, counted = traced(run, subscribe_to_all)
    assert used < 1.1 * counted + 50_000
    run.engine.commands.disconnect(run.session, is_exempt=True)
    run.advance(70)
    assert run.engine.state.memory.queue_bytes < 10_000
