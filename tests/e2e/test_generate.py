"""A bundle from text to text: `LLM`, `relaxpack generate` and `relaxpack chat` on a compiled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import relaxpack.cli as cli
from relaxpack import LLM
from relaxpack.errors import RequestError
from relaxpack.runtime.sampling_params import Grammar

PROMPTS = ["The quick brown fox", "1 2 3", "ď 👨‍👩‍👧 今天", "x",
           "A longer prompt that fills more than one page of sixteen tokens.",
           "def f(x):\n    return x", "Hello, how are you?"]


@pytest.fixture(scope="module")
def llm(tiny_bundle):
    return LLM(tiny_bundle)


def greedy(llm, prompts, count=12, **more):
    return llm.generate(prompts, temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def test_batched_equals_alone(llm):
    together = greedy(llm, PROMPTS)
    assert [c.token_ids for c in together] == [greedy(llm, prompt).token_ids for prompt in PROMPTS]
    assert all(len(c.token_ids) == 12 and c.finish_reason == "length" for c in together)


def test_threads_share_a_compiled_model(llm):
    """Without taking turns two threads in one virtual machine end the process."""
    alone = {prompt: greedy(llm, prompt, 24).token_ids for prompt in PROMPTS}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        done = list(pool.map(lambda prompt: greedy(llm, prompt, 24), PROMPTS))
    assert {prompt: c.token_ids for prompt, c in zip(PROMPTS, done, strict=True)} == alone


def test_a_fork_is_told_and_does_not_wait_forever(tiny_bundle):
    code = ("import os, sys\nfrom relaxpack import LLM\nfrom relaxpack.errors import EnvironmentProblem\n"
            "llm = LLM(sys.argv[1]); llm.generate('x', max_tokens=2)\n"
            "for use in (lambda: llm.generate('x', max_tokens=2), lambda: LLM(sys.argv[1])):\n"
            "    if (child := os.fork()) == 0:\n"
            "        try: use()\n"
            "        except EnvironmentProblem as error: os._exit(42 if 'spawn' in str(error) else 1)\n"
            "        os._exit(0)\n"
            "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42\n")
    done = subprocess.run([sys.executable, "-c", code, tiny_bundle], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr


def test_logprobs_are_those_of_the_tokens(llm):
    done = greedy(llm, PROMPTS[0], logprobs=3)
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    for entry in done.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert np.exp([p for _, p in entry.top]).sum() <= 1


def test_same_seed_same_text(llm):
    def draw(seed):
        return llm.generate(PROMPTS, temperature=1.0, top_p=0.95, seed=seed, max_tokens=12, ignore_eos=True)
    first = [c.token_ids for c in draw(7)]
    assert [c.token_ids for c in draw(7)] == first and [c.token_ids for c in draw(8)] != first


def test_stream_equals_generate(llm):
    whole = greedy(llm, PROMPTS[2], 24).text
    assert "".join(llm.stream(PROMPTS[2], temperature=0.0, max_tokens=24, ignore_eos=True)) == whole


def test_stop_string_of_the_models_own_text(llm):
    text = greedy(llm, PROMPTS[0], 24).text
    stop = text[4:7]
    done = greedy(llm, PROMPTS[0], 24, stop=(stop,))
    assert done.text == text[:text.index(stop)] and done.finish_reason == "stop" and done.stop == stop


def test_grammar_shapes_the_output(llm):
    pytest.importorskip("llguidance")
    done = llm.generate(["Pick:", "Again:"], temperature=1.0, seed=1, grammar=Grammar("choice", ("red", "blue")))
    assert all(c.text in ("red", "blue") and c.finish_reason == "stop" for c in done)


def test_prompt_longer_than_the_context(llm):
    with pytest.raises(RequestError, match=r"300 tokens.*holds 128"):
        llm.generate([5] * 300)
    with pytest.raises(RequestError, match=r"120 tokens and max_tokens is 9.*at most 8"):
        llm.generate([5] * 120, max_tokens=9)


def test_the_command_prints_what_python_gives(llm, tiny_bundle, capsys):
    args = ["generate", str(tiny_bundle), "--raw", "-t", "0", "-n", "12"]
    expected = llm.generate(PROMPTS[:2], temperature=0.0, max_tokens=12)
    assert cli.run([*args, PROMPTS[0], PROMPTS[1], "--json", "--logprobs", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    for shown, completion in zip(document["completions"], expected, strict=True):
        assert shown["ids"] == completion.token_ids and shown["text"] == completion.text
        assert len(shown["logprobs"]) == len(completion.token_ids) and shown["timings"]["prefill_seconds"] > 0
    assert cli.run(["generate", str(tiny_bundle), "--prompt-ids", "5 " * 300]) == 7
    out, err = capsys.readouterr()
    assert out == "" and "300 tokens" in err and "128" in err and err.count("\n") == 1


def test_chat_without_a_terminal_answers_and_exits(tiny_bundle, capsys):
    assert cli.run(["chat", str(tiny_bundle), "-n", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "What is a compiler?" in err and "8 output tokens" in err
