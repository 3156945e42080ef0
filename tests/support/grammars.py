"""Grammars for the tiny models, made without a process of their own."""

import functools
import json
from typing import Any

import pytest

from speclen.worker.frontend import grammar_trial
from speclen.worker.frontend.grammars import StructuredOutput, source
from speclen.worker.sampling.grammar import Grammar
from tests.support import tiny_models


@functools.cache
def matching() -> Any:
    """The tiny models' tokens, as llguidance reads them. Skips the test where it is not installed."""
    pytest.importorskip("llguidance")
    return grammar_trial.make_tokenizer(tiny_models.tokenizer().backend_tokenizer.to_str(), None, [tiny_models.EOS_ID])


def prepare(kind: str, wanted: Any) -> Grammar:
    """wanted: words, or what JSON makes of it."""
    text = wanted if isinstance(wanted, str) else json.dumps(wanted)
    matcher = grammar_trial.make_matcher(
        matching(), source(StructuredOutput(kind, text, "" if kind == "json_schema" else None))
    )
    assert not matcher.is_error(), matcher.get_error()
    return Grammar(matcher, tiny_models.VOCAB_SIZE, [tiny_models.EOS_ID])
