"""Tests of the metrics of stages, and of their text for Prometheus."""

import threading
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry

from tests.prometheus_samples import parse
from tests.stages.executions import around, ending, execution, send
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.interceptor import PoolName
from truenext.stage.interceptors.metrics import ATTEMPT_BUCKETS, BUCKETS, WAIT_BUCKETS, Metrics

KEY: tuple[str, str, PoolName] = ("order", "place", "other")


def test_outcomes_are_counted_by_stage() -> None:
    metrics = Metrics()
    metrics.ended(execution(), ending())
    metrics.ended(execution(), ending())
    metrics.ended(execution(), ending("failed", ValueError()))
    metrics.ended(execution("pay"), ending("released"))
    figures = metrics.snapshot()
    assert figures[KEY].outcomes == {"completed": 2, "failed": 1}
    assert figures["order", "pay", "other"].outcomes == {"released": 1}


def test_a_run_counts_as_running_until_its_stage_ends_however_it_does() -> None:
    metrics = Metrics()
    try:
        with around(InterceptorChain([metrics]), execution()):
            assert metrics.snapshot()[KEY].running == 1
            raise ValueError
    except ValueError:
        assert metrics.snapshot()[KEY].running == 0


def test_a_duration_falls_into_the_bucket_whose_bound_it_does_not_exceed() -> None:
    metrics = Metrics()
    for seconds in (0.0, BUCKETS[0], 0.3, BUCKETS[-1], 11.0):
        metrics.ended(execution(), ending(run=seconds))
    run = metrics.snapshot()[KEY].run
    assert (run.buckets[0], run.buckets[7], run.buckets[-2], run.buckets[-1]) == (2, 1, 1, 1)
    assert run.count == 5
    assert run.sum == BUCKETS[0] + 0.3 + BUCKETS[-1] + 11.0


def test_a_message_that_came_to_no_run_counts_without_one() -> None:
    metrics = Metrics()
    metrics.ended(execution(), ending("rejected", run=None))
    figures = metrics.snapshot()[KEY]
    assert (figures.outcomes, figures.run.count, figures.total.count) == ({"rejected": 1}, 0, 1)


def test_message_handled_in_the_other_pool_counts_apart() -> None:
    metrics = Metrics()
    metrics.ended(execution(), ending())
    metrics.ended(execution(pool="interactive"), ending("failed"))
    figures = metrics.snapshot()
    assert figures[KEY].outcomes == {"completed": 1}
    assert figures["order", "place", "interactive"].outcomes == {"failed": 1}


def test_message_that_is_given_up_counts_by_its_reason() -> None:
    metrics = Metrics()
    metrics.ended(execution(attempt=7), ending("failed", given_up_for="attempts exhausted"))
    metrics.ended(execution(), ending("rejected", given_up_for="unreadable"))
    metrics.ended(execution(), ending("rejected", given_up_for="unreadable"))
    metrics.ended(execution(), ending("failed"))
    assert metrics.snapshot()[KEY].given_up == {"attempts exhausted": 1, "unreadable": 2}


def test_attempts_are_those_of_messages_that_were_completed_or_given_up() -> None:
    metrics = Metrics()
    metrics.ended(execution(attempt=1), ending("failed"))
    metrics.ended(execution(attempt=2), ending("released"))
    metrics.ended(execution(attempt=2), ending())
    metrics.ended(execution(attempt=7), ending("failed", given_up_for="attempts exhausted"))
    attempts = metrics.snapshot()[KEY].attempts
    assert (attempts.count, attempts.sum) == (2, 9)
    assert dict(zip(attempts.bounds, attempts.buckets, strict=False)) == dict.fromkeys(ATTEMPT_BUCKETS, 0) | {
        2: 1,
        7: 1,
    }


def test_waiting_counts_only_messages_that_came_for_the_first_time() -> None:
    metrics = Metrics()
    metrics.ended(execution(waited=90.0), ending())
    metrics.ended(execution(waited=None), ending())
    waited = metrics.snapshot()[KEY].waited
    assert (waited.count, waited.sum) == (1, 90.0)
    assert waited.buckets[WAIT_BUCKETS.index(300.0)] == 1


def test_messages_are_counted_by_the_stage_that_sends_them() -> None:
    metrics = Metrics()
    metrics.sending(execution(), send())
    metrics.sending(execution(), send("mail"))
    metrics.sending(None, send())
    assert metrics.snapshot()[KEY].sent == 2
    assert metrics.sent_outside_stages == 1


def test_a_snapshot_does_not_change_any_more() -> None:
    metrics = Metrics()
    metrics.ended(execution(), ending())
    before = metrics.snapshot()
    metrics.ended(execution(), ending())
    assert before[KEY].outcomes == {"completed": 1}
    assert before[KEY].run.count == 1


def test_metrics_counted_by_several_threads_are_complete() -> None:
    metrics = Metrics()
    start = threading.Barrier(4)

    def count() -> None:
        start.wait()
        for _ in range(2000):
            metrics.ended(execution(), ending())

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(count) for _ in range(4)]:
            each.result()
    assert metrics.snapshot()[KEY].outcomes == {"completed": 8000}


def test_figures_as_text_for_prometheus() -> None:
    metrics = Metrics()
    metrics.ended(execution(waited=0.02), ending("released", run=0.02))
    metrics.ended(execution(), ending(run=0.2))
    metrics.ended(execution(pool="interactive"), ending("rejected", given_up_for="wrong call"))
    metrics.sending(None, send())
    text = metrics.exposition()
    samples = parse(text)
    labels = 'endpoint="order"', 'pool="other"', 'stage="place"'
    interactive = 'endpoint="order"', 'pool="interactive"', 'stage="place"'
    for name, found, expected in (
        ("running", labels, 0),
        ("messages_total", ('endpoint="order"', 'outcome="completed"', *labels[1:]), 1),
        ("messages_total", ('endpoint="order"', 'outcome="released"', *labels[1:]), 1),
        ("sent_total", ('endpoint=""', 'pool=""', 'stage=""'), 1),
        ("given_up_total", (*interactive[:2], 'reason="wrong call"', interactive[2]), 1),
        ("attempts_bucket", (labels[0], 'le="1"', *labels[1:]), 1),
        ("attempts_count", interactive, 1),
        ("wait_seconds_bucket", (labels[0], 'le="43200.0"', *labels[1:]), 1),
        ("wait_seconds_sum", labels, 0.02),
        ("run_seconds_bucket", (labels[0], 'le="0.01"', *labels[1:]), 0),
        ("run_seconds_bucket", (labels[0], 'le="0.025"', *labels[1:]), 1),
        ("run_seconds_bucket", (labels[0], 'le="10.0"', *labels[1:]), 2),
        ("run_seconds_bucket", (labels[0], 'le="+Inf"', *labels[1:]), 2),
        ("run_seconds_sum", labels, 0.22),
        ("run_seconds_count", labels, 2),
        ("total_seconds_count", labels, 2),
    ):
        assert samples[f"truenext_stage_{name}{{{','.join(found)}}}"] == expected, name
    for kind in ("running gauge", "messages_total counter", "run_seconds histogram"):
        assert f"# TYPE truenext_stage_{kind}\n" in text


def test_metrics_of_stages_register_with_a_registry_of_prometheus() -> None:
    registry, metrics = CollectorRegistry(), Metrics()
    registry.register(metrics)
    metrics.sending(None, send())
    sent = {"endpoint": "", "stage": "", "pool": ""}
    assert registry.get_sample_value("truenext_stage_sent_total", sent) == 1


def test_label_that_would_end_its_quotes_is_read_as_it_was() -> None:
    metrics, stage = Metrics(), 'a"b\\c\nd'
    metrics.ended(execution(stage), ending())
    (name,) = (each for each in parse(metrics.exposition()) if each.startswith("truenext_stage_run_seconds_count"))
    assert f'stage="{stage}"' in name
