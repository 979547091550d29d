"""`relaxpack build` as a command: options that make no sense or do nothing, and Ctrl-C wherever it strikes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import relaxpack.cli as cli
import relaxpack.compile
from relaxpack.cli.signals import ENDING, Stopped
from relaxpack.compile.text_members import chat_problem
from relaxpack.errors import CompileError
from relaxpack.explain.pass_notes import NOTES
from relaxpack.passes.config import ON_REQUEST, OPTIONAL
from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.mark.parametrize("options, words", [
    (["--max-context", "1"], "--max-context"), (["--max-context", "100000"], "supports 256 tokens"),
    (["--max-batch", "0"], "--max-batch"), (["--max-batch", str(10**18)], "at most 8388607 sequences"),
    (["--page-size", str(10**18)], "page size"), (["--kv-dtype", "bfloat16"], "float16, float32 or fp8"),
    (["--dtype", "float16"], "float32"),
    (["--disable", "x"], "'x' is no pass that can be disabled: these can be disabled: ShareRopeTable, "),
    (["--disable", "FuseOp"], "did you mean FuseOps?"), (["--enable", "SpreadDecod"], "did you mean SpreadDecode?"),
    (["--enable", "x"], "these can be enabled: FoldNormWeights, FuseResidual, FuseHeadSample, SpreadDecode"),
    (["--enable", "FuseOps"], "runs unless it is disabled or -O is too low"),
    (["--disable", "SpreadDecode"], "runs on request alone: leave out --enable"),
    (["--pretokenizer", "smollm"], "tokenizer.json"), (["--dump", "/proc/x"], "choose another --dump folder"),
    (["--gpu", "H200", "--gpu", "H100"], "'H200' and 'H100': make a bundle for each"),
    (["--target", "x"], "expected cpu")])
def test_options_that_make_no_sense_are_one_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 options: list[str], words: str) -> None:
    assert cli.run(["build", str(checkpoint), "-o", str(tmp_path / "deep" / "x.bundle"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "said"), [
    (signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGHUP, "stopped by SIGHUP")])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_inside_tvm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], swallowed: bool,
                             number: signal.Signals, said: str) -> None:
    """TVM makes an error of a pass of it, or nothing at all."""
    def build(*args: object, progress: relaxpack.compile.Progress, **options: object) -> None:
        try:
            os.kill(os.getpid(), number)
        except (KeyboardInterrupt, Stopped):
            if not swallowed:
                raise CompileError("pass LowerKernels failed: RuntimeError") from None
        progress.advance("next")
        raise AssertionError("went on")
    monkeypatch.setattr(relaxpack.compile, "build_bundle", build)
    before = [signal.getsignal(one) for one in (signal.SIGINT, *ENDING)]
    assert cli.run(["build", "m", "-o", "x"]) == 128 + number
    assert capsys.readouterr().err == f"relaxpack: {said}\n"
    assert [signal.getsignal(one) for one in (signal.SIGINT, *ENDING)] == before


def test_help_lists_the_passes_that_options_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["build", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, needs in ON_REQUEST.items():
        assert f"{name} {NOTES[name].removesuffix(' (on request)')}; needs {needs}" in text
    assert all(name in text for name in OPTIONAL)


@pytest.mark.parametrize(("enabled", "idle"), [("SpreadDecode", True), ("FuseHeadSample", True), ("FoldNormWeights", False)])
def test_an_enabled_pass_that_can_do_nothing_is_said(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     enabled: str, idle: bool) -> None:
    assert cli.run(["build", str(checkpoint), "-o", str(tmp_path / "x.bundle"), "--enable", enabled, "--max-context", "64",
                    "--json"]) == 0
    out, err = capsys.readouterr()
    said = f"the pass {enabled}, which was enabled, found nothing to change for cpu:"
    assert (f"warning: {said}" in err) == idle == any(said in warning for warning in json.loads(out)["warnings"])
    assert not idle or f"it needs {ON_REQUEST[enabled]}" in err


@pytest.mark.parametrize(("shape", "options", "words"), [
    ({"head_dim": 24}, [], "head_dim 24 has no CUDA kernel; supported: multiples of 16"),
    ({"head_dim": 16}, ["--kv-dtype", "fp8"],
     "head_dim 16 has no CUDA kernel; supported: multiples of 32, without --kv-dtype fp8 multiples of 16"),
    ({"hidden_size": 36, "head_dim": 16}, [],
     "model.embed_tokens.weight of 512 x 36: a CUDA matmul needs in_features to be a multiple of 8"),
    ({"intermediate_size": 100}, [], "mlp.down_proj.weight of 64 x 100: a CUDA matmul needs"),
    ({"head_dim": 1024, "num_attention_heads": 1, "num_key_value_heads": 1}, [], "head_dim 1024 with rotary_dim 1024"),
    ({"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 1}, [], "head_dim 64 with 64 query heads"),
    ({"intermediate_size": 100}, ["--target", "cpu"], "cuda:sm_90a: model.layers.0.mlp.down_proj.weight")])
def test_sizes_without_a_kernel_are_said_before_any_work(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                         shape: dict[str, int], options: list[str], words: str) -> None:
    """In one line, without TVM's words about builders that it destroys."""
    write_checkpoint(tmp_path / "checkpoint", **shape)
    assert cli.run(["build", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "out" / "x.bundle"), *options, "--target",
                    "cuda:sm_90a"]) == 4
    err = capfd.readouterr().err
    assert err.startswith("relaxpack: cuda:sm_90a: ") and words in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_linker_is_said_before_any_work(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.run(["build", str(checkpoint), "-o", str(tmp_path / "x.bundle")]) == 6
    assert "no g++: apt-get install g++" in capsys.readouterr().err
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.run(["build", str(checkpoint), "-o", str(tmp_path / "x.bundle")]) == 6
    assert "no no-such-compiler" in capsys.readouterr().err


@pytest.mark.parametrize("template, problem", [
    (None, "no chat template"), ("{% for x in %}", "not valid Jinja"), ("{{ undefined_thing(3) }}", "'undefined_thing'"),
    ("{{ messages[0]['content'] }}", None)])
def test_a_template_that_nobody_can_chat_with_is_said_at_build(tmp_path: Path, template: str | None,
                                                               problem: str | None) -> None:
    found = chat_problem(open_checkpoint(write_checkpoint(tmp_path, chat_template=template)))
    assert (found is None) if problem is None else (found is not None and problem in found)
