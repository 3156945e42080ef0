"""Of every worker the newest life counts: older ones are refused, known ones go on where they were."""

import pytest

from speclen.controller.service.registry import (
    FullError,
    Registration,
    Registry,
)
from speclen.controller.wire.validation import InvalidMessageError
from speclen.records import ContextKey, Limits

KEY = ContextKey("t", "d", "cpu:test", "float32")
OTHER = ContextKey("t", "d", "cuda:test", "float32")
LIMITS = Limits(32, 4)


def registry(max_workers: int = 10, max_contexts: int = 10) -> Registry:
    return Registry(lambda: 100.0, max_workers, max_contexts)


def registration(worker_id="w", epoch=7, key=KEY, limits=LIMITS) -> Registration:
    return Registration(worker_id, epoch, key, limits)


def test_the_same_life_goes_on_where_it_was():
    known = registry()
    worker = known.register(registration())
    for seq in (1, 2, 3):
        worker.seqs.admit(seq)
    worker.durable_seq = 2
    again = known.register(registration())
    assert again is worker
    assert (again.seqs.applied_seq, again.durable_seq) == (3, 2)


def test_a_new_life_starts_over_but_keeps_its_key_and_its_counts():
    known = registry()
    worker = known.register(registration())
    for seq in (1, 5, 5):
        worker.seqs.admit(seq)
    worker.durable_seq, worker.num_reports = 5, 2
    key = worker.worker_key
    again = known.register(registration(epoch=8, key=OTHER))
    assert (again.worker_key, again.epoch, again.context.key) == (key, 8, OTHER)
    assert (again.seqs.applied_seq, again.durable_seq, again.seqs.missing) == (0, 0, [])
    assert (again.num_reports, again.seqs.num_missing, again.seqs.num_repeated) == (2, 3, 1)


def test_one_life_has_one_context():
    known = registry()
    known.register(registration())
    with pytest.raises(InvalidMessageError, match="another context"):
        known.register(registration(key=OTHER))
    assert OTHER not in known.contexts


def test_a_context_has_the_largest_limits_of_its_workers():
    known = registry()
    known.register(registration("a", limits=Limits(8, 6)))
    known.register(registration("b", limits=Limits(32, 2)))
    assert known.contexts[KEY].limits == Limits(32, 6)
    assert known.workers["a"].limits == Limits(8, 6)


def test_numbers_are_bounded_and_the_flag_is_named():
    known = registry(max_workers=1)
    known.register(registration("a"))
    known.register(registration("a", epoch=8))
    with pytest.raises(FullError, match="--max-workers"):
        known.register(registration("b"))
    known = registry(max_contexts=1)
    known.register(registration("a"))
    with pytest.raises(FullError, match="--max-contexts"):
        known.register(registration("b", key=OTHER))
