"""Samples of metrics, as the parser of Prometheus's own client library reads them."""

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def parse(text: str) -> dict[str, float]:
    """Return the value of each sample in a text of metrics, by its name with its labels in the order of their names."""
    return samples_of(text_string_to_metric_families(text))


def samples_of(metrics: Iterable[Metric]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in (each for metric in metrics for each in metric.samples):
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
        key = f"{sample.name}{{{labels}}}" if labels else sample.name
        assert key not in found, f"{key} comes twice"
        found[key] = sample.value
    return found
