"""From request bodies to what the engine takes: prompt ids and `SamplingParams`. The other way is `answers.py`.

Runs on worker threads (tokenizing and compiling grammars take time) and touches no connection. Every refusal is a
RequestError that names its field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relaxpack.errors import RequestError
from relaxpack.runtime.request_stream import RequestStream
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.server.errors import ApiError
from relaxpack.runtime.server.grammars import call_grammar, forced_tools, own_grammar, response_grammar
from relaxpack.runtime.server.model import ServedModel
from relaxpack.runtime.server.protocol import ChatBody, CompletionBody, Message, SamplingBody
from relaxpack.runtime.tool_calls import MARKERS, ToolFormat

MOST_LIKELIEST = 20     # as OpenAI's API has it; each one costs a pass over the logits
MOST_OUTPUTS = 256      # of one HTTP request: prompts times n
MOST_STOPS, LONGEST_STOP = 16, 4096
_PLAIN = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
          "seed", "n", "min_tokens", "ignore_eos")
# What the prompt is made to end with where a call is forced, and how the call names its arguments.
_FORCED: Mapping[ToolFormat | None, tuple[str, str]] = {
    "hermes": ("<tool_call>\n", "arguments"), "mistral": ("[TOOL_CALLS]", "arguments"), "llama3": ("", "parameters"),
    None: ("", "parameters")}


@dataclass
class Job:
    """Requests of one body, and how its answer is to look."""

    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    usage_so_far: bool          # in every chunk
    salt: str
    continuation: bool = False
    show: frozenset[str] = frozenset()
    echo: list[str] | None = None           # text of each prompt, to be given back
    special_in_echo: bool = False           # the prompts were token ids, so their text shows special tokens
    echo_only: bool = False                 # max_tokens was 0: nothing of the output is shown
    tool_format: ToolFormat | None = None   # read tool calls of this format
    tool_start: str = ""                    # already in the prompt: the calls begin with it
    parallel_calls: bool = True
    streams: list[RequestStream] = field(default_factory=list)

    def submit(self, model: ServedModel) -> Job:
        """Give the requests to the engine; all of them or none."""
        try:
            for ids in self.prompts:
                self.streams.append(model.engine.submit(
                    ids, self.params, salt=self.salt, continuation=self.continuation, show=self.show))
        except BaseException:
            self.cancel()
            raise
        return self

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()


def chat_job(body: ChatBody, model: ServedModel, tenant: str = "") -> Job:
    """A body of /v1/chat/completions, checked, with the prompt from the template. Raises RequestError or ApiError with the
    field that is wrong."""
    model.check_name(body.model)
    if body.continue_final_message:
        raise RequestError("continue_final_message is not supported: leave it out, or use /v1/completions with the "
                           "rendered prompt", "continue_final_message")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.tool_choice != "none" else []
    forced = forced_tools(body)
    ids = model.template.encode(
        [plain_message(message) for message in body.messages], tools=tools or None, fold_system=bool(body.fold_system),
        special_in_content=bool(body.special_in_content),
        add_generation_prompt=body.add_generation_prompt is not False, **_template_variables(body))
    grammar = response_grammar(body) or own_grammar(body)
    job = Job([], SamplingParams(), bool(body.stream), *_usage_options(body), tenant + (body.cache_salt or ""))
    if tools:
        job.tool_format, job.show = model.tool_format, MARKERS
        job.parallel_calls = body.parallel_tool_calls is not False
    if forced:
        if grammar is not None:
            raise RequestError("response_format and structured_outputs cannot be combined with a tool_choice that forces "
                               "a call: leave one of them out", "tool_choice")
        job.tool_start, argument = _FORCED[model.tool_format]
        job.tool_format = model.tool_format or "llama3"
        ids += model.tokenizer.encode(job.tool_start, special=True, add_bos=False) if job.tool_start else []
        grammar = call_grammar(forced, argument, listed=model.tool_format == "mistral")
    elif tools and grammar is not None:
        raise RequestError("response_format and structured_outputs leave no room for tool calls: leave tools out, or set "
                           'tool_choice to "none"', "response_format")
    job.prompts = [ids]
    job.params = _params(body, model, grammar=grammar, logprobs=_chat_logprobs(body),
                         max_tokens=_check_max_tokens(_chat_max_tokens(body), job.prompts, model))
    with_context_code(job, model, "messages")
    return job


def completion_job(body: CompletionBody, model: ServedModel, tenant: str = "") -> Job:
    """A body of /v1/completions, checked. Raises RequestError or ApiError with the field that is wrong."""
    model.check_name(body.model)
    n = 1 if body.n is None else body.n
    if body.suffix:
        raise RequestError("suffix is not supported: put what follows into the prompt", "suffix")
    if body.best_of is not None and body.best_of != n:
        raise RequestError(f"best_of is {body.best_of} and n is {n}, but choosing among more outputs than are returned is "
                           "not supported: leave best_of out", "best_of")
    if body.logprobs is not None and not 0 <= body.logprobs <= MOST_LIKELIEST:
        raise RequestError(f"logprobs must be from 0 to {MOST_LIKELIEST}, got {body.logprobs}", "logprobs")
    prompts = prompt_ids(body.prompt, model, body.add_special_tokens)
    if len(prompts) * n > MOST_OUTPUTS:
        raise RequestError(f"{len(prompts)} prompts with n = {n} make {len(prompts) * n} outputs, at most {MOST_OUTPUTS} "
                           "are allowed in one request: send several", "prompt")
    echo_only = bool(body.echo) and body.max_tokens == 0
    job = Job(prompts, SamplingParams(), bool(body.stream), *_usage_options(body), tenant + (body.cache_salt or ""),
              continuation=True, echo_only=echo_only)
    max_tokens = 1 if echo_only else _check_max_tokens(body.max_tokens, prompts, model)
    job.params = _params(body, model, grammar=own_grammar(body), max_tokens=max_tokens, logprobs=body.logprobs,
                         prompt_logprobs=body.logprobs if body.echo else None)
    if body.echo:
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        job.special_in_echo = not isinstance(given[0], str)
        job.echo = [text if isinstance(text, str) else model.tokenizer.decode(ids, skip_special=False)
                    for text, ids in zip(given if len(given) == len(prompts) else [None] * len(prompts), prompts,
                                         strict=True)]
    with_context_code(job, model, "prompt")
    return job


def plain_message(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    plain = message.model_dump(exclude_none=True)
    return {**plain, "role": "system"} if message.role == "developer" else plain


def prompt_ids(prompt: Any, model: ServedModel, add_bos: bool | None, field_name: str = "prompt") -> list[list[int]]:
    """Token ids of each of one or several prompts, text or token ids."""
    if isinstance(prompt, str):
        prompt = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompt = [prompt]
    if not prompt:
        raise RequestError(f"the {field_name} is empty: give text or token ids", field_name)
    encode = model.tokenizer.encode
    return [encode(one, add_bos=add_bos) if isinstance(one, str) else list(one) for one in prompt]


def with_context_code(job: Job, model: ServedModel, field_name: str) -> None:
    """Check early what the engine would refuse, so that the error has OpenAI's code and this body's field names."""
    longest = max(job.prompts, key=len)
    limit, asked = model.engine.max_tokens, job.params.max_tokens
    if len(longest) + (asked or 1) <= limit:
        return
    if asked is None or len(longest) >= limit:
        message = (f"the prompt has {len(longest)} tokens, but this model's context holds {limit} with at least one output "
                   f"token" + (f" (max_tokens: {asked})" if asked else "") +
                   f": shorten the prompt by {len(longest) - limit + 1}")
        raise ApiError(400, message, param=field_name, code="context_length_exceeded")
    raise ApiError(400, f"the prompt has {len(longest)} tokens and max_tokens is {asked}, together {len(longest) + asked}, "
                        f"but this model's context holds {limit}: set max_tokens to at most {limit - len(longest)}, or "
                        "leave it out", param="max_tokens", code="context_length_exceeded")


def _params(body: SamplingBody, model: ServedModel, **own: Any) -> SamplingParams:
    values: dict[str, Any] = dict(model.default_sampling)
    values |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    values |= {"stop": _stops(body.stop or []), "stop_token_ids": tuple(body.stop_token_ids or ()), **own}
    values["logit_bias"] = dict(_bias(token_id, value) for token_id, value in (body.logit_bias or {}).items())
    values["bad_words"] = _bad_words(body.bad_words or [], model)
    return SamplingParams(**values)


def _check_max_tokens(max_tokens: int | None, prompts: Sequence[Sequence[int]], model: ServedModel) -> int | None:
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {max_tokens}: the prompt has {max(map(len, prompts))} "
                           f"tokens, and this model's context holds {model.engine.max_tokens}; leave max_tokens out for all "
                           "that is left", "max_tokens")
    return max_tokens


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MOST_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, at most {MOST_STOPS} are allowed", "stop")
    for text in stops:
        if len(text) > LONGEST_STOP:
            raise RequestError(f"a stop string has {len(text)} characters, at most {LONGEST_STOP} are allowed", "stop")
    return tuple(stops)


def _bias(token_id: str, value: float) -> tuple[int, float]:
    if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
        raise RequestError(f"logit_bias maps token ids to numbers, got the key {token_id!r:.100}: /tokenize gives the ids "
                           "of a text", "logit_bias")
    return int(token_id), value


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and behind a space."""
    if any(not word.strip() for word in words):
        raise RequestError("bad_words must be words, got an empty one", "bad_words")
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(tuple(model.tokenizer.encode(form, add_bos=False)) for form in forms))


def _usage_options(body: SamplingBody) -> tuple[bool, bool]:
    """(in a last chunk, in every chunk)"""
    if body.stream_options is None:
        return False, False
    if not body.stream:
        raise RequestError("stream_options is for streams only: set stream to true, or leave stream_options out",
                           "stream_options")
    include = bool(body.stream_options.include_usage)
    return include, include and bool(body.stream_options.continuous_usage_stats)


def _chat_max_tokens(body: ChatBody) -> int | None:
    both = [value for value in (body.max_completion_tokens, body.max_tokens) if value is not None]
    if len(set(both)) > 1:
        raise RequestError(f"max_completion_tokens is {both[0]} and max_tokens is {both[1]}: give one of them", "max_tokens")
    return both[0] if both else None


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MOST_LIKELIEST:
        raise RequestError(f"top_logprobs must be from 0 to {MOST_LIKELIEST}, got {top}", "top_logprobs")
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
    return (top or 0) if body.logprobs else None


def _template_variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if clash := variables.keys() & {"messages", "tools", "name", "fold_system", "special_in_content", "self",
                                    "add_generation_prompt"}:
        raise RequestError(f"chat_template_kwargs must not set {', '.join(sorted(clash))}: those have fields of their own",
                           "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return variables
