"""What clients may send: request bodies of the OpenAI API with relaxpack's extensions, as pydantic models.

Types are checked here and strictly; ranges are checked by `SamplingParams` and the engine, which know the limits. Unknown
fields are refused, so that a misspelt setting is never silently without effect. What becomes of a body is in `translate.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """JSON does not tell 3 from 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Texts = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
Unused = Annotated[Any, Field(description="Accepted for compatibility; has no effect.")]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="One last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Extension. The usage so far in every chunk.")
    include_obfuscation: Unused = None


class StructuredOutputs(Body):
    """Exactly one of these; what the output must match."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: list[str] | None = Field(None, description="One of these strings.")
    grammar: str | None = Field(None, description="A Lark grammar.")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Of a json_object, as llama.cpp has it.")
    value: dict[str, Any] | None = Field(None, description="Of a json_object, as Hugging Face's client has it.")


class SamplingBody(Body):
    """Settings that completions and chat share. A field that is absent or null has the publisher's value, else OpenAI's."""

    model: str | None = Field(None, description="A name from /v1/models; by default the model served.")
    temperature: float | None = Field(None, description="0 to 100; 0 takes the likeliest token each time.")
    top_p: float | None = Field(None, description="Above 0, up to 1.")
    top_k: Whole | None = Field(None, description="Extension. 0 or -1 is off.")
    min_p: float | None = Field(None, description="Extension. 0 to 1.")
    typical_p: float | None = Field(None, description="Extension. Above 0, up to 1.")
    repetition_penalty: float | None = Field(None, description="Extension. 1 is off.")
    presence_penalty: float | None = Field(None, description="-2 to 2.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id to bias, -100 to 100.")
    seed: Whole | None = Field(None, description="Same seed, same output, alone or in a crowd.")
    n: Whole | None = Field(None, description="Outputs for each prompt.")
    max_tokens: Whole | None = Field(None, description="Most tokens of an output; by default the rest of the context.")
    min_tokens: Whole | None = Field(None, description="Extension. End tokens are banned before so many.")
    stop: Texts | None = Field(None, description="End before any of these strings.")
    stop_token_ids: list[Whole] | None = Field(None, description="Extension.")
    ignore_eos: bool | None = Field(None, description="Extension. The model's end tokens do not end the output.")
    bad_words: list[str] | None = Field(None, description="Extension. Never write these.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension.")
    cache_salt: str | None = Field(None, description="Extension. Only requests with an equal salt share cached prefixes.")
    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[Whole] | list[list[Whole]] = Field(
        description="Text or token ids, one prompt or several.")
    echo: bool | None = Field(None, description="Give the prompt back in front of the output.")
    logprobs: Whole | None = Field(
        None, description="Log-probability of each token and of so many likeliest ones; at most 20.")
    best_of: Whole | None = Field(None, description="Only n itself is supported.")
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(
        None, description="Extension. Put the model's BOS in front; by default as it wants.")


class EmbeddingBody(Body):
    model: str | None = Field(None, description="A name from /v1/models; by default the model served.")
    input: str | list[str] | list[Whole] | list[list[Whole]] = Field(
        description="Text or token ids, one input or several.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: a list of numbers; base64: those as little-endian float32.")
    dimensions: Whole | None = Field(
        None, description="Keep so many leading numbers, normalised again; for models that were trained for it.")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Extension. Of the last token (the default), or the mean over all.")
    normalize: bool | None = Field(None, description="Extension. To length 1; default true.")
    add_special_tokens: bool | None = Field(
        None, description="Extension. Put the model's BOS in front of text; by default as it wants.")
    cache_salt: str | None = Field(None, description="Extension. Only requests with an equal salt share cached prefixes.")
    user: Unused = None


class FunctionCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class Message(BaseModel):
    """Further fields go to the chat template as they are, so an answer can be sent back whole."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    messages: list[Message]
    max_completion_tokens: Whole | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, description="0 to 20; needs logprobs.")
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call an answer.")
    reasoning_effort: str | None = Field(None, description="Given to the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extension. Further variables of the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Extension. Default true.")
    continue_final_message: bool | None = Field(None, description="Not supported.")
    fold_system: bool | None = Field(
        None, description="Extension. Put system messages into the first user message, for models without a system role.")
    special_in_content: bool | None = Field(
        None, description="Extension. Read special tokens written in messages as such; by default they are plain text.")
    modalities: list[Literal["text"]] | None = None


class TokenizeBody(Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Whole]
    skip_special_tokens: bool | None = Field(None, description="Default false: special tokens are shown.")
