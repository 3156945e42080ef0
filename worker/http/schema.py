"""Schema of requests: OpenAI's API with vLLM's additional fields. The engine checks ranges that depend on the model.

Unknown fields are ignored, as in vLLM. Known fields that are not supported are refused: see `UNSUPPORTED`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from speclen.records import MAX_SPECULATION_LENGTH
from speclen.worker.requests.request import MAX_ENTRIES, MAX_LOGPROBS, MAX_STOP_STRINGS, RANGES

MAX_PROMPTS = 64  # in one request
MAX_PARTS = 1024  # of a message's content
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_COUNT = 2**31 - 1

# fail_fast: millions of wrong items would otherwise give as many complaints.
TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(fail_fast=True)]
Prompt: TypeAlias = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def within(name: str) -> Any:
    """Constraint of a field to the range that the engine allows."""
    low, high = RANGES[name]
    return Field(ge=low, le=high)


class Body(BaseModel):
    """A body with strict types: "1" is not a number."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="One more chunk at the end, with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")


class JsonSchema(Body):
    name: str | None = None
    wanted: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Body):
    """As in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """As in vLLM. One of the first five fields must be set."""

    wanted: dict[str, Any] | str | bool | None = Field(None, alias="json", description="JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = Field(None, description="In Lark's notation.")
    disable_any_whitespace: bool | None = Field(None, description="None between the parts of JSON.")
    whitespace_pattern: str | None = Field(None, description="Regular expression of it. Default: any.")
    disable_additional_properties: Literal[False] | None = None


class Sampling(Body):
    """Fields that completions and chats have in common. null stands for the default."""

    model: str | None = Field(None, description="Name from /v1/models; may be left out.")
    stream: bool | None = Field(None, description="Answer by server-sent events.")
    stream_options: StreamOptions | None = None
    n: Annotated[int, within("n")] | None = Field(None, description="Sequences for each prompt. Default 1.")
    max_tokens: Positive | None = Field(None, description="Tokens to generate at most.")
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = Field(
        None, description="Output ends before the first of these."
    )
    seed: Annotated[int, within("seed")] | None = Field(
        None, description="Same seed, same tokens, as far as the dtype allows. -1 is the same as 2**64 - 1."
    )
    temperature: Annotated[float, within("temperature")] | None = Field(None, description="0 is greedy. Default 1.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Default 1.")
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_ENTRIES)] | None = Field(
        None, description="Token ids, as strings, to addends in -100 to 100."
    )
    response_format: ResponseFormat | None = Field(None, description="JSON, of a schema or any.")
    # As in vLLM.
    structured_outputs: StructuredOutputs | None = Field(None, description="What the output must be.")
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = Field(
        None, description="0 or -1: all tokens. Default 0."
    )
    min_p: Annotated[float, within("min_p")] | None = Field(None, description="Default 0.")
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(None, description="Default 1.")
    min_tokens: Count | None = Field(None, description="Nothing ends the output earlier. Default 0.")
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on past the model's end token.")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    return_token_ids: bool | None = Field(None, description="Add token_ids to choices, and prompt_token_ids once.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens `token_id:N` in log probabilities.")
    # Only in speclen.
    speculation: Annotated[int, Field(ge=0, le=MAX_SPECULATION_LENGTH)] | Literal["auto", "off"] | None = Field(
        None, description="Draft tokens per step for this request; auto: the learned table decides."
    )
    include_metrics: bool | None = Field(None, description="Add metrics.speculative_decoding to the answer.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _has_few_entries(cls, bias: Any) -> Any:
        """Check the length before the entries are validated."""
        if isinstance(bias, dict) and len(bias) > MAX_ENTRIES:
            raise ValueError(f"it has {len(bias)} entries; at most {MAX_ENTRIES} are allowed")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise ValueError(f"key {key[:40]!r} is not a token id")
        return bias


class CompletionRequest(Sampling):
    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Log probabilities of the tokens, and of this many of the most likely ones."
    )
    add_special_tokens: bool | None = Field(
        None, description="Those that the tokenizer puts before a text. Default true."
    )


class Part(Body):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = Field(None, description="An assistant's, as its answer had it.")

    @property
    def said(self) -> str:
        return (self.text if self.type == "text" else self.refusal) or ""

    @model_validator(mode="after")
    def _has_its_text(self) -> Part:
        if getattr(self, self.type) is None:
            raise ValueError(f"{self.type} is missing")
        return self


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="An object, or one as JSON.")


class ToolCall(Body):
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    refusal: str | None = Field(None, description="An assistant's, in place of content.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object. Default: no parameters.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatPrompt(Body):
    """Fields that the chat template depends on, besides the messages."""

    add_generation_prompt: bool | None = Field(None, description="Default true.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the chat template.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that take it, or enable_thinking."
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="With tools: none, required, or one of them. Default auto, which is not served."
    )


class ChatRequest(ChatPrompt, Sampling):
    messages: Messages
    max_completion_tokens: Positive | None = Field(None, description="In place of max_tokens.")
    logprobs: bool | None = Field(None, description="Log probabilities of the tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(None, description="With logprobs.")
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most. Default true.")


class TokenizeRequest(ChatPrompt):
    """Either a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


# Fields of OpenAI's and vLLM's APIs that would change the answer but are not supported, with values that are harmless.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),  # or n
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "structural_tag": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
# Alternatives to some of these.
INSTEAD = {
    "guided_choice": 'write structured_outputs: {"choice": …} instead',
    "guided_grammar": 'write structured_outputs: {"grammar": …} instead',
    "guided_json": 'write structured_outputs: {"json": …} instead',
    "guided_regex": 'write structured_outputs: {"regex": …} instead',
    "best_of": "use n, and choose among the answers by their log probabilities",
    "chat_template": "start the worker with --chat-template",
}
