"""Tests of interceptors: when they are called, and what their errors do."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.stages.executions import around, ending, execution, send
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, Interceptor, MessageToSend


class Noting(Interceptor):
    """An interceptor that notes its calls, and fails in one of them if told to."""

    def __init__(self, name: str, notes: list[str], fails: str = "") -> None:
        self._name = name
        self._notes = notes
        self._fails = fails

    def _note(self, what: str) -> None:
        self._notes.append(f"{self._name} {what}")
        if what.startswith(self._fails) and self._fails:
            raise RuntimeError(f"{self._name} {what}")

    @contextmanager
    def around(self, execution: Execution) -> Iterator[None]:
        self._note(f"enters {execution.stage}")
        try:
            yield
        except Exception as error:
            # To swallow it must not help.
            self._note(f"hears of {error}")
        else:
            self._note("leaves")

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        self._note(f"sends {send.destination}")
        send.carrier[self._name] = "1"

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        self._note(result.outcome)


@pytest.fixture
def notes() -> list[str]:
    return []


def test_interceptors_are_entered_in_order_and_left_in_the_other_order(notes: list[str]) -> None:
    with around(InterceptorChain([Noting("a", notes), Noting("b", notes)]), execution()):
        notes.append("stage")
    assert notes == ["a enters place", "b enters place", "stage", "b leaves", "a leaves"]


def test_interceptors_hear_of_the_exception_of_the_stage_and_cannot_swallow_it(notes: list[str]) -> None:
    with (
        pytest.raises(ValueError, match="own"),
        around(InterceptorChain([Noting("a", notes), Noting("b", notes)]), execution()),
    ):
        raise ValueError("own")
    assert notes[-2:] == ["b hears of own", "a hears of own"]


def test_an_interceptor_that_fails_before_the_stage_fails_it(notes: list[str]) -> None:
    chain = InterceptorChain([Noting("a", notes), Noting("b", notes, fails="enters")])
    with pytest.raises(RuntimeError, match="b enters place"), around(chain, execution()):
        notes.append("stage")
    assert notes == ["a enters place", "b enters place", "a hears of b enters place"]


def test_an_interceptor_that_fails_behind_the_stage_fails_it(notes: list[str]) -> None:
    chain = InterceptorChain([Noting("a", notes), Noting("b", notes, fails="leaves")])
    with pytest.raises(RuntimeError, match="b leaves"), around(chain, execution()):
        pass
    assert notes[-1] == "a hears of b leaves"


def test_an_interceptor_does_not_hide_the_exception_of_the_stage(
    notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    chain = InterceptorChain([Noting("a", notes, fails="hears")])
    with pytest.raises(ValueError, match="own"), around(chain, execution()):
        raise ValueError("own")
    assert [record.getMessage() for record in caplog.records] == [
        "the end of a stage's context manager has failed as well"
    ]
    assert vars(caplog.records[0])["context"] == "Noting"


def test_carrier_entries_of_interceptors_are_sent_though_another_interceptor_fails(
    notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    outgoing = send()
    InterceptorChain([Noting("a", notes, fails="sends"), Noting("b", notes)]).sending(None, outgoing)
    assert outgoing.carrier == {"b": "1"}
    assert [record.getMessage() for record in caplog.records] == ["an interceptor has failed"]
    assert (vars(caplog.records[0])["interceptor"], vars(caplog.records[0])["hook"]) == ("Noting", "sending")


def test_interceptors_are_told_the_result_though_another_interceptor_fails(
    notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    chain = InterceptorChain([Noting("a", notes, fails="in doubt"), Noting("b", notes)])
    chain.ended(execution(), ending("in doubt"))
    assert notes == ["a in doubt", "b in doubt"]
    assert [record.getMessage() for record in caplog.records] == ["an interceptor has failed"]


def test_two_messages_share_neither_carrier_nor_what_interceptors_keep() -> None:
    one, other = send(), send()
    one.carrier["a"] = "1"
    assert other.carrier == {}
    first, second = execution(), execution()
    first.interceptor_data[Interceptor()] = 1
    assert second.interceptor_data == {}


def test_hook_without_an_override_is_not_called() -> None:
    class OnlyEnded(Interceptor):
        def ended(self, execution: Execution, result: ExecutionResult) -> None:
            pass

    chain = InterceptorChain([Interceptor(), OnlyEnded()])
    assert (chain.has_around, chain.has_sending, chain.has_ended) == (False, False, True)
    chain = InterceptorChain([])
    assert not (chain.has_around or chain.has_sending or chain.has_ended)


def test_tracing_alone_needs_opentelemetry() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
import truenext.stage.interceptors.chain, truenext.stage.interceptors.log, truenext.stage.interceptors.metrics
import truenext.stage.interceptors
try:
    import truenext.stage.interceptors.tracing
except ImportError:
    print("tracing")
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "tracing\n"
    )
