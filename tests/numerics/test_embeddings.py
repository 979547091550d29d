"""Embeddings of built models: equal to transformers' last hidden states, from bundles that chat too and from ones without
a head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxpack import cli
from relaxpack.cli.build import _elsewhere
from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.canary import CANARY, HIDDEN, CanarySet
from relaxpack.dist.host import Host
from relaxpack.errors import RequestError, UsageError
from relaxpack.explain.document import explanation
from relaxpack.llm import LLM
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.runtime.canaries import check
from relaxpack.runtime.load import load_model
from relaxpack.schedules.cuda_compile import check_library
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.reference.numpy_decoder import hidden_states

LENGTH = 200
TOLERANCE = 2e-3        # float32 sums in another order, as for logits
# Family, what to build of it (`BuildOptions.embeddings`), keys of its config. The second has tied embeddings.
MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": ("llama_bias", ("also", "only"), {}),
    "qwen3, tied": ("qwen3", ("only",), {"use_sliding_window": True, "sliding_window": 100,
                                         "layer_types": ["sliding_attention", "full_attention"]})}


@dataclass
class Built:
    folder: Path
    bundles: dict[str, Path]        # by `BuildOptions.embeddings`
    states: np.ndarray              # [LENGTH, hidden] by transformers
    ids: list[int]


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch = pytest.importorskip("torch", reason="reference: pip install --group reference")
    transformers = pytest.importorskip("transformers", reason="reference: pip install --group reference")
    path = tmp_path_factory.mktemp("embeddings")
    family, kinds, changes = MODELS[request.param]
    folder = write_checkpoint(path / "checkpoint", family, seed=3, **changes)
    bundles = {}
    for kind in kinds:
        bundles[kind] = path / f"{kind}.bundle"
        build_bundle(folder, bundles[kind], options=BuildOptions(
            weights="f32", max_context=LENGTH, max_batch=4, prefill_chunk=64, embeddings=kind))
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, LENGTH).tolist()
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return Built(folder, bundles, states, ids)


def test_equal_to_transformers(built: Built) -> None:
    np.testing.assert_allclose(hidden_states(open_checkpoint(built.folder), built.ids, LENGTH), built.states, atol=TOLERANCE)
    assert built.states.std() > 0.5
    for bundle in built.bundles.values():
        llm = LLM(bundle)
        lengths = (1, 2, 63, 64, 65, LENGTH)
        prompts = [built.ids[:n] for n in lengths]
        last = llm.embed(prompts, normalize=False)
        np.testing.assert_allclose(last, built.states[[n - 1 for n in lengths]], rtol=0, atol=TOLERANCE)
        mean = llm.embed(prompts, pooling="mean", normalize=False)
        np.testing.assert_allclose(mean, [built.states[:n].mean(axis=0) for n in lengths], rtol=0, atol=TOLERANCE)
        short = llm.embed(built.ids, dimensions=16)
        assert short.shape == (16,) and short.dtype == np.float32
        np.testing.assert_allclose(short, built.states[-1, :16] / np.linalg.norm(built.states[-1, :16]), atol=TOLERANCE)
        # The same in one batch, alone, and continued from the cache, but for where the chunks of a prompt end.
        np.testing.assert_allclose(llm.embed(prompts, normalize=False), last, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(llm.embed(prompts[2], normalize=False), last[2])


def test_a_bundle_that_does_both_chats_as_before_while_it_embeds(built: Built) -> None:
    if "also" not in built.bundles:
        return
    llm = LLM(built.bundles["also"])
    alone = llm.generate([built.ids[:50], built.ids[50:70]], max_tokens=12, temperature=0.0)
    fresh = LLM(built.bundles["also"])
    greedy = fresh.params(max_tokens=12, temperature=0.0)
    requests = [fresh.engine.add(ids, greedy) for ids in (built.ids[:50], built.ids[50:70])]
    embedded = [fresh.engine.admit(fresh.engine.prepare_embedding(built.ids[k:150])) for k in (0, 3, 50)]
    while fresh.engine.has_work:
        fresh.engine.step()
    assert [r.sequences[0].output_ids for r in requests] == [c.token_ids for c in alone]
    for request, k in zip(embedded, (0, 3, 50), strict=True):
        expected = LLM(built.bundles["also"]).embed(built.ids[k:150])
        np.testing.assert_allclose(request.embedding, expected, rtol=0, atol=1e-5)


def test_without_generation_the_head_is_gone(built: Built) -> None:
    """Of tied embeddings the one matrix stays, for tokens are looked up in it."""
    names = {}
    for kind, path in built.bundles.items():
        with Bundle.open(path) as bundle:
            [entry] = bundle.manifest.targets
            names[kind] = {name.partition("@")[0] for name in entry.param_order}
            assert bundle.manifest.build_options["embeddings"] == kind
            assert set(entry.functions) == {"only": {"embed"}, "also": {"prefill", "decode", "embed"}}[kind]
            assert explanation(bundle)["prefill"]["kernels"]
    assert "lm_head.weight" not in names["only"]
    if "also" in names:
        assert names["also"] - names["only"] == {"lm_head.weight"}
    else:
        assert open_checkpoint(built.folder).config.tie_embeddings
    assert "model.embed_tokens.weight" in names["only"] and "model.norm.weight" in names["only"]
    with pytest.raises(RequestError, match="--embeddings-only"):
        LLM(built.bundles["only"]).generate("hello")


def test_a_kind_of_embeddings_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none, also, only"):
        build_bundle(write_checkpoint(tmp_path / "x"), tmp_path / "y", options=BuildOptions(embeddings="maybe"))


def test_verify_compares_hidden_states_where_there_are_no_logits(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(built.bundles["only"])]) == 0
    assert "plain: hidden states within 0" in capsys.readouterr().out
    canaries = CanarySet.from_bytes(Bundle.open(built.bundles["only"]).read(CANARY))
    assert canaries.values == HIDDEN
    wrong = dataclasses.replace(canaries.canaries[0], top_logits=tuple(x + 1 for x in canaries.canaries[0].top_logits))
    [report] = check(load_model(built.bundles["only"]).runner, dataclasses.replace(canaries, canaries=(wrong,)))
    assert not report.ok and "the hidden state at" in report.message


def test_chat_says_what_to_build_before_it_asks(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["chat", str(built.bundles["only"])]) == 2
    said = capsys.readouterr()
    assert "--embeddings instead of --embeddings-only" in said.err and ">" not in said.out + said.err


def test_a_gpu_target_is_machine_code_by_rules_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", dtype="bfloat16", num_hidden_layers=1)
    path = tmp_path / "x.bundle"
    assert cli.run(["build", str(folder), "-o", str(path), "--target", "cuda:sm_90a", "--max-context", "32",
                    "--max-batch", "1", "--prefill-chunk", "16", "--embeddings-only"]) == 0
    assert f"Next: relaxpack serve {path}" in capsys.readouterr().err
    bundle = Bundle.open(path)
    [entry] = bundle.manifest.targets
    assert _elsewhere([entry], Host("x86_64", ())) == ", on a machine for cuda:sm_90a"
    check_library(bundle.path(entry.library))
    assert entry.functions == ("embed",) and not entry.buckets and set(entry.kernels) == {"rule", "host"}
    assert not any("lm_head" in name for name in entry.param_order)
