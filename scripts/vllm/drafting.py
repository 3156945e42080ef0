"""vLLM's real speculator of its V2 model runner drafts what is chosen, and its real lookup names the lengths to capture.

    python scripts/vllm/drafting.py

Runs in vLLM's environment, without a device or a model. Counts the passes that the draft model is asked for. Prints one JSON
line.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from speclen.integrations.vllm.engine import ranges_of
from speclen.integrations.vllm.startup import EXTENSION, lookup_to_capture

LARGEST, ROWS = 5, 3


class Counting(StandaloneARSpeculator):
    """The speculator's dummy run without attention. passes: passes of the draft model, prefill included."""

    max_model_len = 64  # a property in some versions

    def __init__(self) -> None:
        self.num_speculative_steps, self.passes = LARGEST, 0
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION))
        self.model = torch.nn.Identity()
        self.draft_tokens = torch.zeros(8, LARGEST, dtype=torch.int64)
        self.last_token_indices = torch.zeros(8, dtype=torch.int64)
        self.idx_mapping = torch.zeros(8, dtype=torch.int64)
        self.arange_gpu = torch.arange(9, dtype=torch.int32)
        self.current_draft_step = torch.tensor(0)
        self.temperature = self.seeds = self.draft_logits = None
        names = ("positions", "seq_lens", "query_start_loc", "input_ids")
        self.input_buffers = SimpleNamespace(**{name: torch.zeros(9, dtype=torch.int64) for name in names})

    def _copy_request_inputs(self, *_: object) -> None:
        pass

    def _run_model(self, input_ids: torch.Tensor, *_: object) -> torch.Tensor:
        self.passes += 1
        return torch.zeros(len(input_ids), 1)

    def sample_draft(self, hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full((len(hidden_states),), 10 + self.passes)


def drafted(chosen: int | None) -> tuple[int, list[int]]:
    """Passes, and the first row's drafts."""
    speculator, zeros = Counting(), torch.zeros(ROWS, dtype=torch.int64)
    batch = SimpleNamespace(
        num_reqs=ROWS,
        num_tokens=ROWS,
        input_ids=zeros,
        positions=zeros,
        seq_lens=zeros,
        idx_mapping=zeros,
        query_start_loc=torch.arange(ROWS + 1),
    )
    found = speculator.propose(
        *(batch, {}, {}, zeros, None, zeros, zeros, zeros, zeros, zeros, zeros),
        dummy_run=True,
        skip_attn_for_dummy_run=True,
        num_speculative_tokens=chosen,
    )
    assert found.shape == (ROWS, LARGEST), found.shape
    return speculator.passes, found[0].tolist()


def main() -> None:
    before = {chosen: drafted(chosen)[0] for chosen in (0, 1, LARGEST)}
    assert set(before.values()) == {LARGEST}, f"vLLM follows lengths by itself: {before}"
    resolve_obj_by_qualname(EXTENSION)  # as each worker does
    found = {chosen: drafted(chosen) for chosen in (None, *range(LARGEST + 1))}
    for chosen, (passes, tokens) in found.items():
        wanted = LARGEST if chosen is None else max(1, chosen)
        assert passes == wanted, f"{chosen}: {passes} passes"
        assert tokens[:wanted] == list(range(11, 11 + wanted)), f"{chosen}: {tokens}"
    users = build_dynamic_sd_schedule_lookup([(1, 4, 5), (5, 16, 2)], 16, LARGEST)
    captured = lookup_to_capture(users, dict.fromkeys(range(9, 17), 0), LARGEST)
    read = build_dynamic_sd_schedule_lookup(ranges_of(captured, lambda *run: run), 16, LARGEST)
    assert read == captured
    passes = {str(chosen): passes for chosen, (passes, _) in found.items()}
    print(json.dumps({"passes": passes, "captured": sorted(set(read[1:]))}))


if __name__ == "__main__":
    main()
