"""OpenVINO GenAI's continuous batching behind a chat server. Runs in the environment of that peer.

Keys and values are kept as the checkpoint's numbers; GenAI's default is 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
import queue

import openvino_genai as genai
from chat_server import ROWS, Asked, serve, take

LARGEST_NGRAM = 3  # that prompt lookup searches for


def load(options: argparse.Namespace) -> genai.ContinuousBatchingPipeline:
    numbers = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    properties: dict[str, object] = dict(numbers)
    if options.draft:
        properties["draft_model"] = genai.draft_model(options.folder / "draft-openvino", "CPU", **numbers)
    if options.lookup:
        properties["prompt_lookup"] = True
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs, scheduling.max_num_batched_tokens = ROWS, 1024
    scheduling.cache_size = 1  # GiB
    return genai.ContinuousBatchingPipeline(options.folder / "target-openvino", scheduling, "CPU", properties)


def generation(asked: Asked, options: argparse.Namespace, eos_id: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.eos_token_id, config.rng_seed = asked.max_tokens, eos_id, asked.seed
    if asked.temperature:
        config.do_sample, config.temperature = True, asked.temperature
    if length := options.draft or options.lookup:
        config.num_assistant_tokens = length
    if options.lookup:
        config.max_ngram_size = LARGEST_NGRAM
    return config


def run(options: argparse.Namespace, waiting: queue.Queue[Asked]) -> None:
    pipeline = load(options)
    tokenizer = pipeline.get_tokenizer()
    names = itertools.count()
    running: list[tuple[genai.GenerationHandle, Asked]] = []
    while True:
        for asked in take(waiting, ROWS - len(running), wait=not running):
            prompt = tokenizer.apply_chat_template(asked.messages, True)
            ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
            config = generation(asked, options, tokenizer.get_eos_token_id())
            running.append((pipeline.add_request(next(names), ids, config), asked))
        pipeline.step()
        ended = [one for one in running if one[0].get_status().name != "RUNNING"]
        running = [one for one in running if one not in ended]
        for handle, asked in ended:
            tokens = [token for output in handle.read_all() for token in output.generated_ids]
            asked.done.set_result((tokenizer.decode(tokens), len(tokens)))


if __name__ == "__main__":
    serve(run)
