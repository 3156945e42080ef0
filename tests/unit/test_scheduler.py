"""Sequences keep their keys and values, are admitted in order, and KV memory is never promised twice."""

import random
from collections.abc import Sequence

import torch

from speclen.worker.backends.kv_cache import KVPool, LayerShape
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.requests.request import GenerationRequest, SamplingParams
from speclen.worker.requests.sequence import SequenceState

CPU = torch.device("cpu")


def sequence(
    name: str,
    prompt: int = 4,
    max_tokens: int = 6,
    fixed_length: int | None = None,
    index: int = 0,
    draft_context: int = 64,
) -> SequenceState:
    request = GenerationRequest(
        name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens), fixed_length=fixed_length
    )
    return SequenceState(
        request,
        index,
        lambda output: None,
        decode=lambda ids: "",
        eos_token_ids=(),
        max_context_length=64,
        draft_context_length=draft_context,
    )


def make_pools(num_rows: int) -> list[KVPool]:
    return [KVPool([LayerShape(1, 8)], num_rows, 80, torch.float32, CPU) for _ in range(2)]


def scheduler(max_batch_size: int = 4, max_kv_tokens: int = 10_000, pools: Sequence[KVPool] | None = None) -> Scheduler:
    pools = pools or make_pools(max_batch_size)
    return Scheduler(*pools, max_batch_size, max_kv_tokens, slack=4, vocab_size=100)


def admitted(queue: Scheduler) -> list[str]:
    """Sequences that get a slot now."""
    before = len(queue.rows)
    assert queue.admit() == []
    return names(queue.rows[before:])


def start(queue: Scheduler) -> None:
    """The first prefilling sequence gets its first token."""
    one = queue.rows[queue.num_decoding]
    one.tokens.append(1)
    queue.settle([one])


def end(queue: Scheduler, one: SequenceState) -> None:
    one.finished = True
    queue.settle([one])


def names(sequences: list[SequenceState]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def test_a_large_request_waits_for_room_and_is_not_overtaken():
    queue = scheduler(max_kv_tokens=40)
    queue.add([sequence("small", max_tokens=6)])  # 4 + 6 + 4 tokens of slack
    queue.add([sequence("large", max_tokens=30)])
    queue.add([sequence("small too", max_tokens=6)])
    assert admitted(queue) == ["small"]
    end(queue, queue.rows[0])
    assert admitted(queue) == ["large"]
    assert queue.num_reserved_tokens == 38
    end(queue, queue.rows[0])
    assert admitted(queue) == ["small too"]
    end(queue, queue.rows[0])
    assert queue.num_reserved_tokens == 0


def check_regions(queue: Scheduler, pools: Sequence[KVPool], marks: dict[str, float]) -> None:
    """Drafting rows first, then the others that decode, then prefilling ones; each row still holds its own mark."""
    assert 0 <= queue.num_drafting <= queue.num_decoding <= len(queue.rows)
    for row, one in enumerate(queue.rows):
        if row < queue.num_decoding:
            assert one.may_draft == (row < queue.num_drafting)
        mark = marks[one.request.request_id]
        assert one.row == row
        for pool, length in zip(pools, (one.target_length, one.draft_length), strict=True):
            assert set(pool.layers[0][row, :, :, :length].unique().tolist()) <= {mark}
            assert length <= pool.max_length


def test_rows_keep_their_contents_through_joins_and_leaves():
    """1,000 random moves; every row's keys and values carry a mark of its own."""
    generator = random.Random(0)
    pools, marks = make_pools(7), {}
    queue = scheduler(max_batch_size=7, pools=pools)
    for number in range(1000):
        action = generator.random()
        if action < 0.35:
            name = str(number)
            marks[name] = float(number + 1)
            own, most = generator.choice([None, 0]), generator.choice([5, 7, 64])
            queue.add([sequence(name, max_tokens=20, fixed_length=own, draft_context=most)])
            queue.admit()
        elif action < 0.7 and queue.num_decoding < len(queue.rows):
            row = queue.num_decoding
            one = queue.rows[row]
            one.target_length, one.draft_length = generator.randrange(1, 60), generator.randrange(60)
            for pool, length in zip(pools, (one.target_length, one.draft_length), strict=True):
                pool.layers[0][row, :, :, :length] = marks[one.request.request_id]
                pool.note_written(row, [length])
            start(queue)
        elif action < 0.8 and queue.num_decoding:
            one = generator.choice(queue.decoding)
            one.tokens.append(1)  # which may be one too many for its draft
            queue.settle([one])
        elif queue.rows:
            # Prefilling rows hold something only when they are the first, as in the engine.
            end(queue, generator.choice(queue.rows))
            queue.admit()
        check_regions(queue, pools, marks)
    while queue.rows:
        end(queue, queue.rows[-1])
        queue.admit()
    assert queue.num_reserved_tokens == 0
    assert pools[0].num_bytes_held() == 0
