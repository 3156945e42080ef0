"""As much of PromQL as our dashboards use, evaluated on two scrapes; what it does not know raises.

A vector is a dictionary from labels to values; a scalar is a number.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

import promql_parser as ast
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Page = dict[str, Vector]

ARITHMETIC = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
ARITHMETIC["/"] = lambda a, b: a / b if b else math.nan
COMPARISONS = {">": lambda a, b: a > b}
AGGREGATES = {"sum": sum, "max": max, "min": min}


def read(page: str, instance: str) -> Page:
    """Samples of a scrape by name, with the label that Prometheus adds."""
    found: Page = defaultdict(dict)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name][frozenset({**sample.labels, "instance": instance}.items())] = sample.value
    return found


def selectors(node) -> Iterator:
    """Every selector of metrics in a parsed expression."""
    match node:
        case ast.VectorSelector():
            yield node
        case ast.MatrixSelector():
            yield node.vector_selector
        case ast.ParenExpr() | ast.AggregateExpr():
            yield from selectors(node.expr)
        case ast.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case ast.Call():
            for argument in node.args:
                yield from selectors(argument)
        case ast.NumberLiteral():
            return
        case _:
            raise NotImplementedError(type(node))


class Scrapes:
    """Two scrapes, seconds apart: rates are between them."""

    def __init__(self, before: Page, after: Page, seconds: float) -> None:
        self.before, self.after, self.seconds = before, after, seconds

    def evaluate(self, expression: str) -> Vector | float:
        return self.value(ast.parse(expression))

    def value(self, node) -> Vector | float:
        match node:
            case ast.NumberLiteral():
                return node.val
            case ast.ParenExpr():
                return self.value(node.expr)
            case ast.VectorSelector():
                return self.select(node, self.after)
            case ast.BinaryExpr():
                return binary(node, self.value(node.lhs), self.value(node.rhs))
            case ast.AggregateExpr():
                return aggregate(node, self.value(node.expr))
            case ast.Call():
                return self.call(node)
        raise NotImplementedError(type(node))

    def call(self, node) -> Vector | float:
        name = node.func.name
        if name == "rate":
            selector = node.args[0].vector_selector
            after = self.select(selector, self.after)
            before = self.select(selector, self.before) if selector.name in self.before else {}
            return {key: (value - before.get(key, 0.0)) / self.seconds for key, value in after.items()}
        if name == "scalar":
            (value,) = self.value(node.args[0]).values()
            return value
        if name == "histogram_quantile":
            return {frozenset(): quantile(node.args[0].val, self.value(node.args[1]))}
        raise NotImplementedError(name)

    def select(self, node, page: Page) -> Vector:
        assert node.name in page, f"there is no metric {node.name}"
        return {key: value for key, value in page[node.name].items() if matches(dict(key), node.matchers.matchers)}


def matches(labels: dict[str, str], matchers) -> bool:
    for matcher in matchers:
        assert matcher.op in (ast.MatchOp.Re, ast.MatchOp.Equal), matcher.op
        assert matcher.name in labels, f"there is no label {matcher.name}"
        pattern = matcher.value if matcher.op == ast.MatchOp.Re else re.escape(matcher.value)
        if not re.fullmatch(pattern, labels[matcher.name]):
            return False
    return True


def binary(node, left: Vector | float, right: Vector | float) -> Vector | float:
    if str(node.op) in COMPARISONS:
        assert isinstance(left, dict)
        assert isinstance(right, float)
        return {key: value for key, value in left.items() if COMPARISONS[str(node.op)](value, right)}
    operator = ARITHMETIC[str(node.op)]
    if isinstance(left, dict) and isinstance(right, dict):
        on = list(node.modifier.matching.labels) if node.modifier and node.modifier.matching else None
        matched = {kept(key, on): value for key, value in right.items()}
        assert len(matched) == len(right)
        return {k: operator(v, matched[kept(k, on)]) for k, v in left.items() if kept(k, on) in matched}
    if isinstance(left, dict):
        return {key: operator(value, right) for key, value in left.items()}
    if isinstance(right, dict):
        return {key: operator(left, value) for key, value in right.items()}
    return operator(left, right)


def aggregate(node, vector: Vector) -> Vector:
    by = list(node.modifier.labels) if node.modifier else []
    groups: dict[Labels, list[float]] = defaultdict(list)
    for key, value in vector.items():
        assert set(by) <= dict(key).keys(), f"{by} are not among {sorted(dict(key))}"
        groups[kept(key, by)].append(value)
    return {key: AGGREGATES[str(node.op)](values) for key, values in groups.items()}


def kept(key: Labels, names: list[str] | None) -> Labels:
    return key if names is None else frozenset(pair for pair in key if pair[0] in names)


def quantile(wanted: float, buckets: Vector) -> float:
    """By linear interpolation in its bucket, as Prometheus does."""
    counts = sorted((float(dict(key)["le"]), value) for key, value in buckets.items())
    rank, low, below = wanted * counts[-1][1], 0.0, 0.0
    for high, count in counts:
        if count >= rank:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / max(count - below, 1e-12)
        low, below = high, count
    return math.nan
