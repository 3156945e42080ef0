"""Record how the texts of serving tracks repeat themselves, and which of their tokens the draft model foresees.

`python scripts/record_texts.py`, about two minutes, writes bench/simulation/copying/recorded.npz. The bundled target
answers requests of each mix of tracks, one at a time; seeded outputs do not depend on what was speculated, so what any plan
would have done with them follows from four numbers a token: longest match before it, tokens that a copy would propose, how
many of them are right, and whether the draft model chooses the same token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.recipes import MIXES
from speclen.bench.serving.tracks import Arrival, draw_requests
from speclen.bench.simulation.copying.recorded import FILE, MOST_PROPOSED
from speclen.worker.drafting.copying import CopyIndex
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.sampling.noise import exponential, make_key
from speclen.worker.sampling.verification import choose, distribution

TEXTS = {"code": 64, "mixed": 160, "copying": 64, "sampled": 64}  # requests of each mix
SEED = 0


def main() -> None:
    torch.set_num_threads(1)
    pair = load_pair("bundled:target", "bundled:draft", "cpu", "float32")
    drawer = PromptDrawer(pair.tokenizer)
    columns: dict[str, list[Any]] = {"mix": [], "temperature": [], "tokens": [], "told": []}
    for number, (mix, count) in enumerate(TEXTS.items()):
        rng = np.random.default_rng([SEED, number])
        arrivals = draw_requests(rng, np.arange(count, dtype=float), MIXES[mix])
        for arrival, prompt in zip(arrivals, drawer.for_arrivals(arrivals), strict=True):
            output = answer(pair, prompt, arrival)
            columns["mix"].append(mix)
            columns["temperature"].append(arrival.temperature)
            columns["tokens"].append(len(output))
            columns["told"].append(told_of(pair, prompt, output, arrival))
        print(f"{mix}: {count} texts", flush=True)
    columns["told"] = np.concatenate(columns["told"]).astype(np.int8)
    with Path(FILE).open("wb") as file:
        np.savez_compressed(file, **{name: np.array(values) for name, values in columns.items()})


@torch.inference_mode()
def answer(pair: ModelPair, prompt: tuple[int, ...], arrival: Arrival) -> list[int]:
    """What the target alone says."""
    output: list[int] = []
    ids, past = torch.tensor([prompt]), None
    while len(output) < arrival.output_tokens:
        said = pair.target(input_ids=ids, past_key_values=past, use_cache=True)
        ids, past = choices(said.logits[:, -1:], arrival, len(output)), said.past_key_values
        output.append(int(ids[0, 0]))
    return output


def choices(logits: torch.Tensor, arrival: Arrival, first: int) -> torch.Tensor:
    """Tokens that are chosen from these logits, [1, columns], with the noise of output positions from `first` on."""
    vocab, columns = logits.shape[-1], logits.shape[1]
    probs = distribution(logits, torch.tensor([arrival.temperature]))
    key = torch.tensor([make_key(arrival.sampling_seed, 0)])
    return choose(probs, exponential(key, torch.arange(first, first + columns)[None], vocab))


@torch.inference_mode()
def told_of(pair: ModelPair, prompt: tuple[int, ...], output: list[int], arrival: Arrival) -> np.ndarray:
    """By output token, as if it were the next: match before it, proposed copies, right ones, whether the draft is right."""
    text = [*prompt, *output]
    assert pair.draft is not None
    logits = pair.draft(input_ids=torch.tensor([text]), use_cache=False).logits[:, len(prompt) - 1 : -1]
    drafted = choices(logits[..., : pair.target.config.vocab_size], arrival, 0)[0].tolist()
    index, told = CopyIndex(), np.zeros((len(output), 4), dtype=np.int64)
    for place, token in enumerate(output):
        end = len(prompt) + place
        index.extend(text[:end], end)
        found = index.find(1, MOST_PROPOSED)
        told[place, 3] = drafted[place] == token
        if found is not None:
            right = next(
                (at for at, each in enumerate(found.ids) if text[end + at : end + at + 1] != [each]), len(found.ids)
            )
            told[place, :3] = found.match_length, len(found.ids), right
    return told


if __name__ == "__main__":
    main()
