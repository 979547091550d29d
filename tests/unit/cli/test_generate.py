"""`relaxpack generate` over a scripted model."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

import relaxpack.cli as cli
import relaxpack.llm
from relaxpack.llm import LLM
from relaxpack.runtime.engine import Engine
from tests.helpers.text import ScriptedRunner, answering, chatml


def upper(text):
    return (text.rpartition("user\n")[2].partition("<|im_end|>")[0] if "<|im_start|>" in text else text).upper()


@pytest.fixture
def model(monkeypatch, tmp_path):
    tokenizer = chatml()
    runner = ScriptedRunner(tokenizer, answering(tokenizer, upper, 2))
    llm = LLM.from_engine(Engine(runner, end_token_ids=(2,)), tokenizer)
    monkeypatch.setattr(relaxpack.llm, "LLM", lambda bundle, **options: llm)
    return llm, str(tmp_path)


def run(capsys, *args):
    code = cli.run(["generate", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_prompt_prints_its_answer(model, capsys):
    assert run(capsys, model[1], "hello ď") == (0, "HELLO Ď\n", "")


def test_raw_and_ids(model, capsys):
    llm, bundle = model
    assert run(capsys, bundle, "--raw", "abc")[:2] == (0, "ABC\n")
    ids = ",".join(map(str, llm.encode("abc")))
    code, out, _ = run(capsys, bundle, "--prompt-ids", ids, "--json")
    [completion] = json.loads(out)["completions"]
    assert code == 0 and completion["prompt_ids"] == llm.encode("abc") and completion["text"] == "ABC"


def test_json_has_ids_text_logprobs_and_timings(model, capsys):
    llm, bundle = model
    code, out, _ = run(capsys, bundle, "hi", "--json", "--logprobs", "2")
    [completion] = json.loads(out)["completions"]
    assert code == 0 and completion["text"] == "HI" and completion["finish_reason"] == "stop"
    assert completion["ids"] == [*llm.encode("HI"), 2]
    first = completion["logprobs"][0]
    assert first["id"] == completion["ids"][0] and first["logprob"] <= 0 and len(first["top"]) == 2
    assert "".join(entry["token"] for entry in completion["logprobs"][:-1]) == "HI"
    assert completion["timings"]["prompt_tokens"] == len(completion["prompt_ids"])
    assert completion["timings"]["prefill_seconds"] >= 0 and completion["timings"]["decode_seconds"] >= 0


def test_several_prompts_are_one_batch(model, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("three\n\nfour\n")
    code, out, _ = run(capsys, model[1], "one", "two", "--prompts-file", str(file))
    assert code == 0 and out == "[0] ONE\n[1] TWO\n[2] THREE\n[3] FOUR\n"


def test_prompt_from_standard_input(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run(capsys, model[1], "-")[:2] == (0, "FROM A PIPE\n")


def test_limits_and_stops(model, capsys):
    _llm, bundle = model
    assert run(capsys, bundle, "abc xyz", "--stop", " X")[1] == "ABC\n"
    code, out, _ = run(capsys, bundle, "abc", "--json", "--max-tokens", "1")
    [completion] = json.loads(out)["completions"]
    assert code == 0 and len(completion["ids"]) == 1 and completion["finish_reason"] == "length"


def test_special_tokens_in_a_prompt_are_text(model, capsys):
    _llm, bundle = model
    for flags, count in ([], 0), (["--special"], 1):
        _, out, _ = run(capsys, bundle, "--raw", "--json", "a<|im_end|>", "-n", "1", *flags)
        assert json.loads(out)["completions"][0]["prompt_ids"].count(2) == count


@pytest.mark.parametrize("args, code, words", [
    ([], 2, "no prompt"), (["x", "--logprobs", "3"], 2, "add --json"), (["--prompt-ids", "1,b"], 2, "token ids"),
    (["--prompt-ids", "²"], 2, "token ids"),
    (["x", "--raw", "--system", "s"], 2, "--system"), (["x", "--temperature", "-1"], 7, "temperature"),
    (["--prompt-ids", "100000"], 7, "100000"), (["--prompt-ids", "5 " * 600], 7, "600 tokens"),
    (["x", "--stop", ""], 7, "stop"),
])
def test_bad_input_is_one_line(model, capsys, args, code, words):
    found, out, err = run(capsys, model[1], *args)
    assert (found, out) == (code, "") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("bytes_, words", [(b"ab\xff", "not UTF-8 text (byte 2)"), (b"\xed\xa0\x80", "not UTF-8")])
def test_bytes_that_are_no_text_are_one_line(model, capsys, monkeypatch, tmp_path, bytes_, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes_)))
    (tmp_path / "prompts.txt").write_bytes(bytes_)
    for args in (["-"], ["--prompts-file", str(tmp_path / "prompts.txt")], [os.fsdecode(bytes_)],
                 ["x", "--system", os.fsdecode(bytes_)]):
        code, out, err = run(capsys, model[1], *args)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1, args


def test_prompts_are_utf8_in_any_locale(model, capsys):
    """In the C locale of Python without its UTF-8 mode, arguments arrive as escaped bytes."""
    assert run(capsys, model[1], "é日".encode().decode("ascii", "surrogateescape"))[1] == "É日\n"


def test_missing_bundle_names_the_command_that_makes_one(capsys):
    code, _out, err = run(capsys, "no/such.bundle", "x")
    assert code == 5 and "relaxpack build" in err and err.count("\n") == 1
