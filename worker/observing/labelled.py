"""A metrics page on which every sample says which model it is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric


class Labelled:
    """Collects another registry, with labels added to every sample."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            samples = [sample._replace(labels=self._labels | sample.labels) for sample in metric.samples]
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = samples
            yield labelled


def page_of(registry: CollectorRegistry, model_name: str) -> CollectorRegistry:
    """What is shown to Prometheus: the registry, labelled, and the process."""
    page = CollectorRegistry()
    page.register(Labelled(registry, {"model_name": model_name}))
    ProcessCollector(registry=page)
    PlatformCollector(registry=page)
    return page
