"""Ask vLLM's own validator whether it accepts the output of `speclen export --format vllm`, read from stdin."""

import json
import sys

from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

given = json.load(sys.stdin)
table = given["num_speculative_tokens_per_batch_size"]
build_dynamic_sd_schedule_lookup(table, table[-1][1], given["num_speculative_tokens"])
print("vLLM takes the exported table")
