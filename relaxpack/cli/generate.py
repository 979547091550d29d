"""`relaxpack generate`: complete prompts from the command line, for scripts. Text on standard output as it comes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from relaxpack.cli.options import (
    bundle_argument,
    device_option,
    existing_bundle,
    json_option,
    parse_ids,
    sampling,
    sampling_options,
    standard_input,
    utf8,
)
from relaxpack.errors import RelaxpackError, UsageError

if TYPE_CHECKING:
    from relaxpack.llm import LLM
    from relaxpack.runtime.sampler import TokenLogprobs
    from relaxpack.runtime.text_generation import Completion
    from relaxpack.runtime.tokenizer import Tokenizer


@click.command(short_help="Complete prompts, for scripts.")
@bundle_argument
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--prompt-ids", multiple=True, metavar="IDS", help="A prompt as token ids, like 1,2,3.")
@click.option("--prompts-file", type=click.File("r", encoding="utf-8"), help="One prompt a line.")
@click.option("--raw", is_flag=True, help="Continue the prompt itself, without the chat template.")
@click.option("--special", is_flag=True, help="Read special tokens written in prompts as such.")
@click.option("--system", metavar="TEXT", help="System message in front of each prompt.")
@sampling_options
@device_option
@click.option("--logprobs", type=click.IntRange(0), metavar="N",
              help="Log-probability of each token and of the N likeliest (with --json).")
@json_option
def generate(bundle: str, prompts: tuple[str, ...], prompt_ids: tuple[str, ...], prompts_file: Any, raw: bool,
             special: bool, system: str | None, device: str | None, logprobs: int | None, as_json: bool,
             **options: Any) -> None:
    """Complete each PROMPT with the model in BUNDLE.

    A prompt is a user message unless --raw or --prompt-ids is given; "-" reads one prompt from standard input. Several
    prompts are computed together. With --json the result is one document: ids, text, logprobs and timings.
    """
    raw = raw or bool(prompt_ids)
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is shown with --json only: add --json")
    if system is not None and raw:
        raise UsageError("--system needs the chat template: leave out --raw and --prompt-ids")
    ids = [parse_ids(text) for text in prompt_ids]
    texts = [standard_input() if prompt == "-" else utf8(prompt, "the prompt") for prompt in prompts]
    texts += _lines(prompts_file) if prompts_file is not None else []
    system = None if system is None else utf8(system, "the system message")
    if not ids and not texts:
        raise UsageError("no prompt: give one, or - for standard input, or --prompt-ids, or --prompts-file")
    existing_bundle(bundle)

    from relaxpack.cli.progress import counting
    from relaxpack.llm import LLM

    started = time.perf_counter()
    with counting("weights to the GPU", quiet=as_json, transfer=True) as progress:
        llm = LLM(bundle, device=device, progress=progress)
    loaded = time.perf_counter() - started
    params = llm.params(**sampling(options), logprobs=logprobs)
    encoded = ids + [llm.encode(text, special=special) if raw else _chat_ids(llm, text, system, special)
                     for text in texts]
    show = len(encoded) == 1 and not as_json
    answers: dict[int, Completion] = {}
    for completion, piece in llm.generator.stream(encoded, params, continuation=raw):
        answers[completion.prompt_index] = completion
        if show:
            click.echo(piece, nl=False)
            sys.stdout.flush()
    done = [answers[number] for number in sorted(answers)]
    for completion in done:
        if completion.error is not None:
            raise RelaxpackError(f"prompt {completion.prompt_index}: {completion.error}")
    if as_json:
        document = {"bundle": bundle, "load_seconds": loaded,
                    "completions": [completion_json(c, llm.tokenizer) for c in done]}
        click.echo(json.dumps(document, ensure_ascii=False, indent=2))
    elif show:
        click.echo()
    else:
        for completion in done:
            click.echo(f"[{completion.prompt_index}] {completion.text}")


def _lines(file: Any) -> list[str]:
    try:
        return [line.rstrip("\n") for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise UsageError(f"{file.name} is not UTF-8 text (byte {error.start})") from None


def _chat_ids(llm: LLM, text: str, system: str | None, special: bool) -> list[int]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return llm.template.encode([*before, {"role": "user", "content": text}], special_in_content=special)


def completion_json(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """A completion as the command's JSON has it; `logprobs` only where they were asked for."""
    timings = completion.timings
    assert timings is not None
    result: dict[str, Any] = {
        "prompt_ids": completion.prompt_ids, "ids": completion.token_ids, "text": completion.text,
        "finish_reason": completion.finish_reason, "stop": completion.stop,
        "timings": {**asdict(timings), "prefill_tokens_per_second": timings.prefill_rate,
                    "decode_tokens_per_second": timings.decode_rate}}
    if completion.logprobs is not None:
        result["logprobs"] = [_logprobs_json(entry, tokenizer) for entry in completion.logprobs]
    return result


def _logprobs_json(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id, "token": tokenizer.token_text(token_id), "logprob": logprob}
    return {**one(entry.token_id, entry.logprob), "top": [one(*pair) for pair in entry.top]}
