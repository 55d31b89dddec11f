"""Tests of producers: used numbers, the outcome of COMMITs, forgetting, and the changes written to the store."""

from collections.abc import Callable

import pytest

from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.producer import CommitOutcome, user_producer
from truenext.engine.writing import producers as producers_module
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.engine.writing.producers import ProducerRegistry
from truenext.errors import RemoteProtocolError
from truenext.model.batch import Batch, ProducerState
from truenext.model.commands import Commit, Send
from truenext.model.destination import parse_address
from truenext.model.limits import PRODUCER_RETENTION_MS, PRODUCER_RETENTION_MS_MIN, PRODUCERS_MAX, RESOLVED_MAX
from truenext.model.message import SentMessage

COMMITTED, ROLLED_BACK = CommitOutcome.COMMITTED, CommitOutcome.ROLLED_BACK
NOT_SO_FAR, UNKNOWN = CommitOutcome.NOT_YET_COMMITTED, CommitOutcome.UNKNOWN

LATER_MS = PRODUCERS_MAX + PRODUCER_RETENTION_MS_MIN


def send(name: str, number: int = 1, *, is_gapless: bool = False) -> Send:
    message = SentMessage(4, True, 0, b"", b"")
    return Send(parse_address("/queue/q", ""), message, producer=name, number=number, is_gapless=is_gapless)


def commit(name: str, number: int = 1, *, is_gapless: bool = False) -> Commit:
    return Commit("t", name, number, is_gapless=is_gapless)


def use_number(producers: ProducerRegistry, command: Send | Commit, *, is_stored: bool = True) -> bool:
    """True if it is a repeat."""
    if producers.find_repeat(command) is not None:
        return True
    producers.record_use(command, is_stored=is_stored)
    return False


def outcome(
    producers: ProducerRegistry, number: int, *, name: str = "p", resolves: bool = False
) -> CommitOutcome | None:
    return producers.query(name, number, resolves=resolves).outcome


class ProducersDriver:
    """Registry with the maximal number of producers, each with one SEND, a millisecond after the one before."""

    def __init__(self) -> None:
        self.commit_state = CommitState(NoEventLog())
        self.producers = ProducerRegistry(self.commit_state)
        for number in range(PRODUCERS_MAX):
            self.send(str(number))

    @property
    def batch(self) -> Batch:
        return self.commit_state.batch

    def send(self, name: str, number: int = 1) -> bool:
        """True if it is a repeat."""
        self.commit_state.now_ms += 1
        return use_number(self.producers, send(name, number))

    def commit(self, name: str, number: int) -> None:
        self.commit_state.now_ms += 1
        assert not use_number(self.producers, commit(name, number))

    def restart(self) -> None:
        states = self.batch.producers.items()
        self.producers = ProducerRegistry(self.commit_state)
        self.producers.restore(sorted(states, key=lambda item: item[1].last_used_ms))

    def take_forgotten(self) -> list[str]:
        """Return the producers forgotten since the last call."""
        forgotten, self.batch.forgotten_producers = self.batch.forgotten_producers, []
        assert self.producers.take_forgotten()[0] == len(forgotten)
        return forgotten


@pytest.fixture
def driver() -> ProducersDriver:
    return ProducersDriver()


def test_a_new_producer_takes_the_place_of_the_one_that_was_not_used_for_longest(driver: ProducersDriver) -> None:
    # C18.8
    driver.commit_state.now_ms = LATER_MS
    assert not driver.send("new")
    assert driver.take_forgotten() == ["0"]
    assert not driver.send("newer")
    assert driver.take_forgotten() == ["1"]
    assert driver.send("new")
    assert not driver.send("0"), "it was forgotten"
    assert driver.take_forgotten() == ["2"]
    assert "2" not in driver.batch.producers


def test_within_the_hour_none_goes_and_the_refusal_says_how_many_there_are(driver: ProducersDriver) -> None:
    # C18.8
    driver.commit_state.now_ms = 1 + PRODUCER_RETENTION_MS_MIN - 2
    with pytest.raises(RemoteProtocolError, match=f"there are {PRODUCERS_MAX} producers"):
        driver.send("new")
    assert not driver.send("new"), "a millisecond later"
    assert driver.take_forgotten() == ["0"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same run", "after a restart"])
def test_producer_used_more_than_once_is_never_forgotten(driver: ProducersDriver, is_restarted: bool) -> None:
    # C18.8
    driver.send("0", 2)
    driver.commit("1", 2)
    assert driver.send("2")
    if is_restarted:
        driver.restart()
    driver.commit_state.now_ms = LATER_MS
    assert not driver.send("new")
    assert driver.take_forgotten() == ["3"]


def test_a_producer_whose_first_use_is_a_commit_never_goes() -> None:
    commit_state = CommitState(NoEventLog())
    producers, batch = ProducerRegistry(commit_state), commit_state.batch
    for number in range(PRODUCERS_MAX):
        producers.record_use(commit(str(number)), is_stored=True)
    with pytest.raises(RemoteProtocolError, match="the broker may forget none of them"):
        commit_state.now_ms = LATER_MS
        producers.find_repeat(commit("new"))
    commit_state.now_ms = PRODUCER_RETENTION_MS
    producers.forget_old()
    assert producers.find_repeat(commit("new")) is None
    assert len(batch.forgotten_producers) == PRODUCERS_MAX
    assert producers.take_forgotten()[0] == 0, "it was their time"


def test_repeat_is_stored_the_first_time_and_only_if_the_send_was() -> None:
    commit_state = CommitState(NoEventLog())
    producers = ProducerRegistry(commit_state)
    commit_state.now_ms = 10
    producers.record_use(send("stored"), is_stored=True)
    producers.record_use(send("transient"), is_stored=False)
    commit_state.close_batch()
    batch = commit_state.batch
    for commit_state.now_ms in (20, 30):
        for name in ("stored", "transient"):
            assert producers.find_repeat(send(name)) is not None
    assert batch.producers == {"stored": ProducerState(1, 20, is_gapless=False)}
    after = ProducerState(1, 30, is_gapless=False)
    assert dict(producers.unstored_states()) == dict.fromkeys(("stored", "transient"), after)


def test_producer_forgotten_and_used_again_in_the_same_batch_is_stored(driver: ProducersDriver) -> None:
    driver.commit_state.now_ms = LATER_MS
    driver.send("new")
    driver.send("0", 7)
    assert driver.batch.producers["0"] == ProducerState(7, LATER_MS + 2, is_used_once=True, is_gapless=False)
    assert driver.take_forgotten() == ["0", "1"]


# Numbers of one producer ----------------------------------------------------------------------------------------------


@pytest.fixture
def commit_state() -> CommitState:
    return CommitState(NoEventLog())


@pytest.fixture
def producers(commit_state: CommitState) -> ProducerRegistry:
    return ProducerRegistry(commit_state)


@pytest.mark.parametrize("is_gapless", [False, True])
def test_sends_and_commits_count_by_themselves(producers: ProducerRegistry, is_gapless: bool) -> None:
    # C18.5
    for number in (1, 2):
        assert not use_number(producers, send("p", number, is_gapless=is_gapless))
    assert not use_number(producers, commit("p", 1, is_gapless=is_gapless))
    assert (
        use_number(producers, send("p", 1))
        and use_number(producers, send("p", 2))
        and use_number(producers, commit("p", 1))
    )
    assert not use_number(producers, send("p", 3)) and not use_number(producers, commit("p", 2))
    known = producers.query("p", None, resolves=False)
    assert known.producer is not None and known.outcome is None
    assert (known.producer.highest_send, known.producer.highest_commit) == (3, 2)


@pytest.mark.parametrize("make", [send, commit])
def test_a_number_too_far_on_is_refused_and_does_nothing(
    producers: ProducerRegistry, make: Callable[..., Send | Commit]
) -> None:
    # C19.1
    with pytest.raises(
        RemoteProtocolError, match="number 2 of producer 'p', whose numbers have no gaps: the next is 1"
    ):
        producers.find_repeat(make("p", 2, is_gapless=True))
    assert producers.query("p", None, resolves=False).producer is None
    with pytest.raises(RemoteProtocolError, match="numbers without gaps begin with 1"):
        producers.find_repeat(make("p", 0, is_gapless=True))
    assert not use_number(producers, make("p", 1, is_gapless=True))
    for declares_again in (False, True):
        with pytest.raises(RemoteProtocolError, match="the next is 2"):
            producers.find_repeat(make("p", 3, is_gapless=declares_again))
        with pytest.raises(RemoteProtocolError, match="begin with 1"):
            producers.find_repeat(make("p", 0, is_gapless=declares_again))
    assert not use_number(producers, make("p", 2))


def test_producer_with_used_numbers_cannot_become_gapless(producers: ProducerRegistry) -> None:
    assert not use_number(producers, send("p", 1))
    for command in (send("p", 2, is_gapless=True), send("p", 1, is_gapless=True), commit("p", 1, is_gapless=True)):
        with pytest.raises(RemoteProtocolError, match="producer 'p' has used numbers without this header"):
            producers.find_repeat(command)
    assert not use_number(producers, send("p", 7))


@pytest.mark.parametrize("make", [send, commit])
def test_a_repeat_is_unknown_if_its_number_may_have_been_left_out(
    producers: ProducerRegistry, make: Callable[..., Send | Commit]
) -> None:
    # C19.7
    for number in (1, 2):
        producers.record_use(make("gapless", number, is_gapless=True), is_stored=True)
        producers.record_use(make("other", number), is_stored=True)
    for name, number, is_unknown in [
        ("gapless", 1, False),
        ("gapless", 2, False),
        ("other", 1, True),
        ("other", 2, False),
    ]:
        command = make(name, number)
        assert producers.find_repeat(command) is not None
        assert (command.is_repeat, command.is_unknown) == (True, is_unknown), command


def test_a_number_of_0_is_one_that_may_be_used(producers: ProducerRegistry) -> None:
    assert outcome(producers, 0) is UNKNOWN
    assert not use_number(producers, commit("p", 0))
    assert outcome(producers, 0) is COMMITTED
    assert use_number(producers, commit("p", 0))


def test_commit_outcomes_of_a_gapless_producer(producers: ProducerRegistry) -> None:
    # C19.2
    assert (outcome(producers, 1), outcome(producers, 2), outcome(producers, 0)) == (NOT_SO_FAR, UNKNOWN, UNKNOWN)
    use_number(producers, send("p", 1, is_gapless=True))
    assert (outcome(producers, 1), outcome(producers, 2), outcome(producers, 0)) == (NOT_SO_FAR, NOT_SO_FAR, UNKNOWN)
    for number in (1, 2):
        use_number(producers, commit("p", number))
    assert [outcome(producers, number) for number in range(4)] == [UNKNOWN, COMMITTED, COMMITTED, NOT_SO_FAR]


def test_commit_outcomes_of_a_producer_with_gaps(producers: ProducerRegistry) -> None:
    # C19.2
    for number in (3, 5):
        use_number(producers, commit("p", number))
    assert [outcome(producers, number) for number in (2, 3, 4, 5, 6)] == [UNKNOWN] * 3 + [COMMITTED, NOT_SO_FAR]


def test_gapless_producer_has_only_its_next_commit_resolved(producers: ProducerRegistry) -> None:
    # C19.3
    use_number(producers, commit("p", 1, is_gapless=True))
    assert outcome(producers, 3, resolves=True) is NOT_SO_FAR
    assert outcome(producers, 1, resolves=True) is COMMITTED
    assert outcome(producers, 2, resolves=True) is ROLLED_BACK
    with pytest.raises(RemoteProtocolError, match="COMMIT 2 of producer 'p' was resolved as rolled back"):
        producers.find_repeat(commit("p", 2))
    assert not use_number(producers, commit("p", 3)), "what is resolved counts as used"
    assert [outcome(producers, number) for number in (1, 2, 3)] == [COMMITTED, ROLLED_BACK, COMMITTED]
    assert not use_number(producers, send("p", 1)), "SENDs have numbers of their own"


def test_producer_with_gaps_has_any_commit_above_the_highest_resolved(producers: ProducerRegistry) -> None:
    # C19.3
    use_number(producers, commit("p", 3))
    assert outcome(producers, 2, resolves=True) is UNKNOWN
    assert outcome(producers, 9, resolves=True) is ROLLED_BACK
    command = commit("p", 8)
    assert producers.find_repeat(command) is not None and command.is_unknown
    assert [outcome(producers, number) for number in (3, 8, 9, 10)] == [UNKNOWN, UNKNOWN, ROLLED_BACK, NOT_SO_FAR]


@pytest.mark.parametrize("is_gapless", [False, True])
def test_producer_with_only_resolved_commits_says_with_its_first_use_whether_it_has_gaps(
    producers: ProducerRegistry, is_gapless: bool
) -> None:
    # C19.5
    assert outcome(producers, 2, resolves=True) is UNKNOWN
    assert outcome(producers, 1, resolves=True) is ROLLED_BACK
    assert outcome(producers, 3, resolves=True) is NOT_SO_FAR, "it may turn out to have no gaps"
    assert outcome(producers, 2, resolves=True) is ROLLED_BACK
    for declares in (False, True):
        with pytest.raises(RemoteProtocolError, match="resolved as rolled back"):
            producers.find_repeat(commit("p", 2, is_gapless=declares))
    assert not use_number(producers, commit("p", 3, is_gapless=is_gapless))
    producer = producers.query("p", None, resolves=False).producer
    assert producer is not None and producer.is_gapless is is_gapless
    assert [outcome(producers, number) for number in (1, 2, 3)] == [ROLLED_BACK, ROLLED_BACK, COMMITTED]


def test_number_of_resolved_commits_of_all_producers_is_limited(
    producers: ProducerRegistry, commit_state: CommitState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred numbers of each of a hundred thousand producers would take more memory than there is."""
    # C19.4
    monkeypatch.setattr(producers_module, "RESOLVED_TOTAL_MAX", 3)
    for name in "pqr":
        assert producers.query(name, 1, resolves=True).outcome is ROLLED_BACK
    assert producers.query("s", 1, resolves=True) == (None, NOT_SO_FAR, 0)
    assert producers.query("p", 2, resolves=True).outcome is NOT_SO_FAR
    assert producers.query("p", 1, resolves=True).outcome is ROLLED_BACK
    producers.forget(ConnectionState("x"), ["q"])
    assert producers.query("s", 1, resolves=True).outcome is ROLLED_BACK
    after = ProducerRegistry(commit_state)
    after.restore((name, commit_state.batch.producers[name]) for name in "prs")
    assert after.query("r", 2, resolves=True).outcome is NOT_SO_FAR


def test_highest_resolved_commits_are_remembered_and_all_below_them_are_unknown(
    producers: ProducerRegistry,
) -> None:
    # C19.4
    use_number(producers, commit("p", 1, is_gapless=True))
    for number in range(2, RESOLVED_MAX + 2):
        assert outcome(producers, number, resolves=True) is ROLLED_BACK
    assert outcome(producers, 1) is COMMITTED
    assert outcome(producers, RESOLVED_MAX + 2, resolves=True) is ROLLED_BACK
    assert [outcome(producers, number) for number in (1, 2, 3)] == [UNKNOWN, UNKNOWN, ROLLED_BACK]
    for number in (1, 2):
        command = commit("p", number)
        assert producers.find_repeat(command) is not None and command.is_unknown


def test_a_question_that_resolves_nothing_is_no_use_and_one_that_does_is() -> None:
    driver = ProducersDriver()
    driver.commit_state.now_ms = LATER_MS
    for resolves, name in ((False, "0"), (True, "1")):
        driver.producers.query(name, 1, resolves=resolves)
    assert not driver.send("new")
    assert driver.take_forgotten() == ["0"]
    assert not driver.send("newer")
    assert driver.take_forgotten() == ["2"]
    assert driver.producers.query("1", 1, resolves=False).outcome is ROLLED_BACK


def test_a_question_for_which_there_is_no_room_resolves_nothing() -> None:
    driver = ProducersDriver()
    driver.commit_state.now_ms = 1 + PRODUCER_RETENTION_MS_MIN - 2
    known = driver.producers.query("new", 1, resolves=True)
    assert (known.producer, known.outcome) == (None, NOT_SO_FAR)
    driver.commit_state.now_ms = LATER_MS
    assert driver.producers.query("new", 1, resolves=True).outcome is ROLLED_BACK
    assert driver.take_forgotten() == ["0"]


# What of this is durable, and when ------------------------------------------------------------------------------------


def test_answer_about_a_producer_waits_for_the_batch_it_reports(
    commit_state: CommitState, producers: ProducerRegistry
) -> None:
    # C19.2, C19.6
    use_number(producers, commit("p", 1))
    use_number(producers, commit("transient", 1), is_stored=False)
    commit_state.close_batch()
    assert producers.query("p", 1, resolves=False).batch == 1
    assert "transient" not in commit_state.batch.producers
    assert producers.query("transient", 1, resolves=False).batch == 2
    assert commit_state.batch.producers["transient"].highest_commit == 1, "what is answered is durable"
    assert producers.query("p", 2, resolves=True).batch == 2
    assert commit_state.batch.producers["p"].resolved == (2,)
    commit_state.close_batch()
    assert producers.query("p", 2, resolves=True).batch == 2, "it is resolved already"
    assert not commit_state.batch.producers
    assert producers.query("q", 1, resolves=False).batch == 0
    producers.forget(ConnectionState("s"), ["p"])
    assert producers.query("p", 1, resolves=False).batch == 3


def test_producers_are_forgotten_on_request_and_the_receipt_waits_for_that(
    commit_state: CommitState, producers: ProducerRegistry
) -> None:
    # C18.9
    for name in "pqr":
        use_number(producers, send(name, 5))
    commit_state.close_batch()
    session = ConnectionState("s")
    producers.forget(session, ["p", "nobody", "q"])
    assert commit_state.batch.forgotten_producers == ["p", "q"]
    assert session.last_batch == 2
    assert not use_number(producers, send("p", 5)) and use_number(producers, send("r", 5))
    assert producers.take_forgotten()[0] == 0, "it was asked for"


def test_producer_state_survives_a_restart(commit_state: CommitState, producers: ProducerRegistry) -> None:
    use_number(producers, send("p", 1, is_gapless=True))
    use_number(producers, commit("p", 1))
    for number in range(2, RESOLVED_MAX + 3):
        producers.query("p", number, resolves=True)
    producers.query("resolved", 1, resolves=True)
    after = ProducerRegistry(commit_state)
    after.restore(commit_state.batch.producers.items())
    assert [outcome(after, number) for number in (1, 2, 3)] == [UNKNOWN, UNKNOWN, ROLLED_BACK]
    assert outcome(after, RESOLVED_MAX + 3) is NOT_SO_FAR
    with pytest.raises(RemoteProtocolError, match="no gaps"):
        after.find_repeat(send("p", 3))
    assert not use_number(after, commit("resolved", 2, is_gapless=True))


# ---- Producers of users ----


def test_producer_of_a_user_begins_with_the_numbers_of_before_and_is_its_own_from_then_on() -> None:
    producers = ProducerRegistry(CommitState(NoEventLog()))
    assert not use_number(producers, send("p", 5)) and not use_number(producers, commit("p", 2))
    shop, till = user_producer("shop", "p"), user_producer("till", "p")
    assert use_number(producers, send(shop, 5)) and not use_number(producers, send(shop, 6))
    assert outcome(producers, 2, name=shop) is COMMITTED and outcome(producers, 3, name=shop) is NOT_SO_FAR
    # Neither the former producer nor that of another user has used 6.
    assert not use_number(producers, send(till, 6)) and not use_number(producers, send("p", 6))
    assert not use_number(producers, commit(shop, 3))
    assert outcome(producers, 3, name=till) is NOT_SO_FAR


def test_forgotten_producer_of_a_user_does_not_begin_as_a_copy_again() -> None:
    commit_state = CommitState(NoEventLog())
    producers = ProducerRegistry(commit_state)
    session = ConnectionState("s")
    assert not use_number(producers, commit("p", 2))
    shop = user_producer("shop", "p")
    assert not use_number(producers, commit(shop, 3))
    producers.forget(session, [shop])
    # As for any name that is not known.
    assert outcome(producers, 3, name=shop) is UNKNOWN and outcome(producers, 1, name=shop) is NOT_SO_FAR
    assert not use_number(producers, commit(shop, 1))
    assert outcome(producers, 1, name=shop) is COMMITTED
    assert outcome(producers, 2, name="p") is COMMITTED


def test_errors_name_the_producer_as_the_client_does() -> None:
    producers = ProducerRegistry(CommitState(NoEventLog()))
    with pytest.raises(RemoteProtocolError, match="of producer 'p', whose numbers have no gaps"):
        producers.find_repeat(send(user_producer("shop", "p"), 2, is_gapless=True))
