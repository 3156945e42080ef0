"""Metric families that are made when Prometheus asks, under one prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Values = Mapping[Any, float]  # by the labels' values, a tuple


class Families:
    """Makes families. prefix: of every name."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(f"{self._prefix}_{name}", text, value=value)

    def gauges(self, name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
        return _filled(GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=labels), values)

    def counters(self, name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
        return _filled(CounterMetricFamily(f"{self._prefix}_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
