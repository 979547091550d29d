"""`LLM`: a bundle in Python. Loads it once and answers prompts and chats; several at once are batched.

Runs the engine in the caller's thread; several threads may call one LLM, and their prompts are batched. `relaxpack serve`
is for many clients.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from relaxpack.errors import RequestError, UsageError
from relaxpack.model_info import ModelInfo
from relaxpack.runtime.chat_template import ChatTemplate, Message
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.pooling import EmbeddingParams, Pooling
from relaxpack.runtime.sampler import Constraint
from relaxpack.runtime.sampling_params import Grammar, SamplingParams
from relaxpack.runtime.structured import GrammarCompiler
from relaxpack.runtime.text_generation import Completion, TextGenerator
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.tool_calls import MARKERS, parse_tool_calls

if TYPE_CHECKING:
    import numpy as np

if TYPE_CHECKING:
    from relaxpack.runtime.load import LoadedModel

Prompt = str | Sequence[int]
Chat = Sequence[Message]


class LLM:
    """A loaded model.

    >>> llm = LLM("my.bundle")                                          # doctest: +SKIP
    >>> print(llm.generate("The sky is", max_tokens=8))                 # doctest: +SKIP
    >>> print(llm.chat([{"role": "user", "content": "Hi"}]))            # doctest: +SKIP

    Sampling is greedy unless the publisher advises otherwise or `params`, or fields of `SamplingParams` as keywords,
    say so.
    """

    loaded: LoadedModel | None      # where a bundle was loaded: what that took, and its graphs

    def __init__(self, bundle: str | Path, *, device: str | None = None, num_pages: int | None = None,
                 progress: Callable[[int, int], None] | None = None) -> None:
        """`device`: "cpu" or "cuda", by default the best target of the bundle that fits this machine. `num_pages`:
        pages of the KV cache, by default what the bundle's limits need. `progress` is called with the bytes of weights
        that are on the device, and all of them."""
        if device not in (None, "cpu", "cuda"):
            raise UsageError(f"device {device!r}: known are cpu and cuda")
        from relaxpack.runtime.load import load_model  # imports TVM, which only a real bundle needs

        shown = {} if progress is None else {"progress": progress}
        loaded = load_model(bundle, num_pages=num_pages, kind=device, **shown)
        engine = Engine(loaded.runner, executor=loaded.make_executor(), end_token_ids=loaded.info.end_token_ids,
                        make_constraint=_grammars(loaded.tokenizer, loaded.info))
        self._setup(engine, loaded.tokenizer, loaded.info)
        self.loaded = loaded

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer, info: ModelInfo | None = None) -> LLM:
        """An LLM over an engine that is already there."""
        llm = cls.__new__(cls)
        llm._setup(engine, tokenizer, info)
        return llm

    def _setup(self, engine: Engine, tokenizer: Tokenizer, info: ModelInfo | None) -> None:
        self.engine, self.tokenizer, self.info = engine, tokenizer, info
        self.loaded = None
        self.template = ChatTemplate(tokenizer)
        self.generator = TextGenerator(engine, tokenizer)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or sent to another process: load its bundle there")

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The publisher's advice; greedy where there is none or it says not to sample."""
        advice = {k: v for k, v in self.tokenizer.text.generation.items() if v is not None}
        sample = advice.pop("do_sample", None)
        known = {k: v for k, v in advice.items() if k in SamplingParams.__dataclass_fields__}
        return {"temperature": 0.0} if sample is False else {"temperature": 0.0, **known}

    def params(self, **sampling: Any) -> SamplingParams:
        """`SamplingParams` from `default_sampling` and what is given here."""
        unknown = sampling.keys() - SamplingParams.__dataclass_fields__.keys()
        if unknown:
            known = list(SamplingParams.__dataclass_fields__)
            near = difflib.get_close_matches(min(unknown), known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
            raise RequestError(f"unknown sampling parameter {', '.join(sorted(unknown))}: {hint}", min(unknown))
        return SamplingParams(**{**self.default_sampling, **sampling})

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, *,
                 special: bool = False, **sampling: Any) -> Any:
        """Continue raw prompts (no chat template), text or token ids. One prompt gives one `Completion`, a list of
        prompts a list in their order (n of each for n > 1). `special` reads special tokens written in the text."""
        single = _is_prompt(prompts)
        if not single and (isinstance(prompts, bytes) or not isinstance(prompts, Iterable)):
            raise RequestError(f"a prompt is text or a list of token ids, got {_short(prompts)}")
        several: Sequence[Any] = [prompts] if single else prompts
        ids = [self.encode(prompt, special=special) for prompt in several]
        done = self.generator.complete(ids, params or self.params(**sampling), continuation=True)
        return _checked(done)[0] if single and len(done) == 1 else _checked(done)

    def chat(self, messages: Chat | Sequence[Chat], params: SamplingParams | None = None, *,
             tools: Sequence[Mapping[str, Any]] | None = None, special_in_content: bool = False,
             template_options: Mapping[str, Any] | None = None, **sampling: Any) -> Any:
        """Answer one conversation or a list of them. Message and tool formats are those of the OpenAI API; calls that
        the model wrote are in `tool_calls`. `template_options` are further variables of the chat template."""
        if isinstance(messages, str):
            raise RequestError('a chat is a list of messages like [{"role": "user", "content": "Hi"}], got text; generate '
                               "continues text")
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if single else messages
        ids = [self.template.encode(chat, tools=tools, special_in_content=special_in_content,
                                    **(template_options or {})) for chat in chats]
        done = self.generator.complete(ids, params or self.params(**sampling), show=MARKERS if tools else ())
        form = self.template.tool_format if tools else None
        if form is not None:
            for completion in done:
                completion.text, completion.tool_calls = parse_tool_calls(completion.text, form)
        return _checked(done)[0] if single and len(done) == 1 else _checked(done)

    def stream(self, prompt: Prompt | Chat, params: SamplingParams | None = None, *,
               cancelled: Callable[[], bool] = lambda: False, **sampling: Any) -> Iterator[str]:
        """Pieces of text as they come, for a raw prompt or one conversation; close the iterator to stop."""
        chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self.template.encode(prompt) if chat else self.encode(prompt)   # type: ignore[arg-type]
        own = params or self.params(**sampling)
        if own.n != 1:
            raise RequestError(f"a stream is one answer, and n is {own.n}: ask `chat` or `generate` for several", "n")
        for completion, text in self.generator.stream([ids], own, continuation=not chat, cancelled=cancelled):
            if text:
                yield text
            if completion.finish_reason:
                _checked([completion])

    def embed(self, inputs: Prompt | Sequence[Prompt], *, pooling: Pooling = "last", dimensions: int | None = None,
              normalize: bool = True, special: bool = False) -> np.ndarray:
        """Last hidden states of text or token ids, pooled: float32 [H] for one input, [n, H] for a list. Needs a bundle
        built with `--embeddings`. `dimensions` keeps so many leading numbers; `normalize` makes the length 1."""
        single = _is_prompt(inputs)
        if not single and (isinstance(inputs, bytes) or not isinstance(inputs, Iterable)):
            raise RequestError(f"an input is text or a list of token ids, got {_short(inputs)}")
        several: Sequence[Any] = [inputs] if single else inputs
        params = EmbeddingParams(pooling=pooling, dimensions=dimensions, normalize=normalize)
        found = self.generator.embed([self.encode(one, special=special) for one in several], params)
        return found[0] if single else found

    def encode(self, prompt: Prompt, *, special: bool = False) -> list[int]:
        """Token ids of a raw prompt; ids pass through."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=special)
        if not _is_prompt(prompt):
            raise RequestError(f"a prompt is text or a list of token ids, got {_short(prompt)}")
        return [int(token_id) for token_id in prompt]


def _grammars(tokenizer: Tokenizer, info: ModelInfo) -> Callable[[Grammar], Constraint]:
    """Compiles `SamplingParams.grammar`; the library for it is needed at the first one only."""
    @cache
    def compiler() -> GrammarCompiler:
        return GrammarCompiler(tokenizer.tokenizer_json, info.vocab_size, info.end_token_ids)
    return lambda grammar: compiler()(grammar)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    # NumPy's integers count as token ids; its arrays are no Sequence, and bytes are one that nobody means.
    return (isinstance(value, Iterable) and isinstance(value, Sized) and not isinstance(value, bytes) and len(value) > 0
            and all(isinstance(item, Integral) and not isinstance(item, bool) for item in value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _checked(completions: list[Completion]) -> list[Completion]:
    """Raise the error of the first answer that failed."""
    for completion in completions:
        if completion.error is not None:
            raise RequestError(f"prompt {completion.prompt_index}: {completion.error}")
    return completions
