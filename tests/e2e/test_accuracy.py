"""SmolLM2-135M-Instruct with its real weights: equal to transformers in float32, and a bounded drift in every other
format. The numbers that stand behind the bounds are in docs/accuracy.md.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.compile.weights import choose_formats
from relaxpack.llm import LLM
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.quantize import quantize
from relaxpack.runtime.load import LoadedModel, load_model
from relaxpack.weight_format import FORMATS, QuantizedTensor
from tests.helpers.numerics import decode_logits, greedy_batch, kl_divergence, log_softmax, prefill_logits, run, tapes
from tests.helpers.prompts import PROMPTS

pytestmark = pytest.mark.slow
STEPS = 64


@dataclass
class Told:
    """What the float32 build says: token ids of every prompt, its greedy continuation, first-step logits."""

    model: LoadedModel
    ids: dict[str, list[int]]
    answers: dict[str, list[int]]
    first: dict[str, np.ndarray]

    @cached_property
    def logits(self) -> dict[bool, np.ndarray]:
        """What `logits_of` finds, by `decode`."""
        return {decode: logits_of(self.model, self, decode) for decode in (False, True)}


@pytest.fixture(scope="module")
def told(smollm2: Callable[[str], Path]) -> Told:
    import tokenizers

    model = load_model(smollm2("f32"))
    tokenizer = tokenizers.Tokenizer.from_str(model.bundle.read("tokenizer/tokenizer.json").decode())
    ids = {name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in PROMPTS.items()}
    answers, first = greedy_batch(model.runner, list(ids.values()), STEPS)
    return Told(model, ids, dict(zip(ids, answers, strict=True)), dict(zip(ids, first, strict=True)))


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    """The model in transformers, float32, on the checkpoint's dequantised weights."""
    torch = pytest.importorskip("torch", reason="reference: pip install --group reference")
    transformers = pytest.importorskip("transformers", reason="reference: pip install --group reference")
    checkpoint = open_checkpoint("smollm2")
    c = checkpoint.config
    assert c.architecture == "llama" and c.rope.kind == "default" and c.tie_embeddings and not c.qkv_bias
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_position, rms_norm_eps=c.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=True)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name, value in dequantized(checkpoint).items():
        state[name] = torch.from_numpy(value)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is computed, not stored
    return model


@pytest.fixture(scope="module")
def transformers_logits(transformers_model: Any) -> Callable[[list[int], int], np.ndarray]:
    """Logits [last, vocab] after the last tokens of a sequence, by transformers."""
    import torch

    def logits(ids: list[int], last: int) -> np.ndarray:
        with torch.inference_mode():
            return transformers_model(torch.tensor([ids]), logits_to_keep=last).logits[0].numpy()

    return logits


def dequantized(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Every tensor in float32."""
    tensors = {}
    for name in checkpoint.tensors:
        value = checkpoint.read(name)
        tensors[name] = np.array(value.dequantize() if isinstance(value, QuantizedTensor) else value, np.float32)
    return tensors


def test_the_prompts_are_varied(told: Told) -> None:
    lengths = [len(ids) for ids in told.ids.values()]
    assert len(lengths) >= 20 and min(lengths) == 1 and max(lengths) > 512
    assert sum(length > 4 * told.model.info.page_size for length in lengths) >= 2


def test_float32_says_what_transformers_says(
        told: Told, transformers_logits: Callable[[list[int], int], np.ndarray]) -> None:
    """First-step log-probabilities of the top 20 within 2e-3, and 64 identical greedy tokens on every prompt. One
    forward over prompt and answer shows every step: each token must be the best after all before it."""
    worst, least, different = 0.0, np.inf, []
    for name, prompt in told.ids.items():
        answer = told.answers[name]
        expected = transformers_logits([*prompt, *answer[:-1]], STEPS)
        top = np.argsort(-expected[0])[:20]
        worst = max(worst, float(np.abs(log_softmax(told.first[name])[top] - log_softmax(expected[0])[top]).max()))
        second, best = np.partition(expected, -2, -1)[:, -2:].T
        least = min(least, float((best - second).min()))
        if answer != expected.argmax(-1).tolist():
            different.append(name)
    print(f"largest first-step difference {worst:.2g}, closest decision {least:.2g}")
    assert worst < 2e-3
    assert not different


def test_embeddings_are_the_last_hidden_states_of_transformers(told: Told, smollm2: Callable[[str], Path],
                                                               transformers_model: Any) -> None:
    """In float32 to the last digits; in the weights of the GGUF, which are the same ones, but for activations in int8."""
    import torch

    states = []
    for ids in told.ids.values():
        with torch.inference_mode():
            states.append(transformers_model.model(torch.tensor([ids])).last_hidden_state[0].numpy())
    expected = {"last": [own[-1] for own in states], "mean": [own.mean(axis=0) for own in states]}
    exact, quantised = LLM(smollm2("f32")), LLM(smollm2("as-is"))
    for pooling, vectors in expected.items():
        directions = np.array([vector / np.linalg.norm(vector) for vector in vectors])
        got = exact.embed(list(told.ids.values()), pooling=pooling)     # type: ignore[arg-type]
        np.testing.assert_allclose(got, directions, rtol=0, atol=2e-5)
        near = quantised.embed(list(told.ids.values()), pooling=pooling)     # type: ignore[arg-type]
        cosines = (near * directions).sum(axis=1)
        print(f"{pooling}: {np.abs(got - directions).max():.2g}, cosines from {cosines.min():.4f}")
        assert cosines.min() > 0.997


@dataclass(frozen=True)
class Drift:
    """Against the float32 build, over positions of prompts and answers. KL in nats."""

    mean_kl: float
    max_kl: float
    top1: float        # share of positions with the same best token
    top20: float       # largest difference of a log-probability among the reference's first 20


# Measured values are in docs/accuracy.md; the bounds leave about half as much again.
BOUNDS = {
    "as-is": Drift(mean_kl=0.004, max_kl=0.1, top1=0.95, top20=2.5),
    "q8": Drift(mean_kl=0.004, max_kl=0.1, top1=0.95, top20=2.5),
    "fp8": Drift(mean_kl=0.02, max_kl=0.4, top1=0.93, top20=4.0),
    "f16": Drift(mean_kl=4e-6, max_kl=1e-4, top1=0.995, top20=0.06),
}
KV_BOUND = Drift(mean_kl=0.0105, max_kl=0.3, top1=0.945, top20=3.6)    # of e4m3 pages
DRIFT_PROMPTS = ("raw fact", "chat fact", "json", "several pages")


@pytest.fixture(scope="module")
def float_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a float16 Hugging Face folder, as if it had never been quantised: q8 and fp8 have something to quantise."""
    checkpoint, folder = open_checkpoint("smollm2"), tmp_path_factory.mktemp("float")
    c, assets = checkpoint.config, checkpoint.assets
    save_file({name: value.astype(np.float16) for name, value in dequantized(checkpoint).items()},
              folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes(assets.files["tokenizer.json"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": assets.eos_token}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "vocab_size": c.vocab_size, "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_epsilon, "rope_theta": c.rope.theta, "tie_word_embeddings": True,
        "eos_token_id": assets.end_token_ids[0]}))
    return folder


def logits_of(model: LoadedModel, told: Told, decode: bool) -> np.ndarray:
    """Logits of the prompts and answers; with `decode` those of the answers, computed token by token in one batch."""
    sequences = [[*told.ids[name], *told.answers[name]] for name in DRIFT_PROMPTS]
    group = tapes(model.runner, sequences)
    if not decode:
        return np.concatenate([prefill_logits(tape, len(tape.token_ids)) for tape in group])
    for tape in group:
        run(model.runner, [tape.step(len(tape.token_ids) - STEPS, "none")])
    return np.concatenate([run(model.runner, [tape.step(1) for tape in group]) for _ in range(STEPS)])


def drift(reference: np.ndarray, other: np.ndarray) -> Drift:
    p, q = log_softmax(reference), log_softmax(other)
    kl = kl_divergence(p, q)
    top = np.argpartition(p, -20, -1)[:, -20:]
    difference = np.take_along_axis(p, top, -1) - np.take_along_axis(q, top, -1)
    return Drift(float(kl.mean()), float(kl.max()), float((p.argmax(-1) == q.argmax(-1)).mean()),
                 float(np.abs(difference).max()))


@pytest.mark.parametrize("weights", BOUNDS)
def test_drift_of_other_formats(told: Told, smollm2: Callable[[str], Path], float_checkpoint: Path, tmp_path: Path,
                                weights: str, record_property: Callable[[str, object], None]) -> None:
    quantised = weights in ("q8", "fp8")
    if quantised:
        build_bundle(float_checkpoint, tmp_path / "b", options=BuildOptions(weights=weights, max_context=1024))
    model = load_model(tmp_path / "b" if quantised else smollm2(weights))
    for decode in (False, True):
        found = drift(told.logits[decode], logits_of(model, told, decode))
        record_property("decode" if decode else "prefill", asdict(found))
        print(weights, "decode" if decode else "prefill", found)
        bound = BOUNDS[weights]
        assert found.mean_kl <= bound.mean_kl and found.max_kl <= bound.max_kl
        assert found.top1 >= bound.top1 and found.top20 <= bound.top20


def test_drift_of_e4m3_pages(told: Told, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Weights and arithmetic in float32: all of it comes from keys and values with three mantissa bits."""
    build_bundle("smollm2", tmp_path / "b", options=BuildOptions(weights="f32", max_context=1024, kv_dtype="fp8"))
    model = load_model(tmp_path / "b")
    for decode in (False, True):
        found = drift(told.logits[decode], logits_of(model, told, decode))
        record_property("decode" if decode else "prefill", asdict(found))
        print("e4m3 pages", "decode" if decode else "prefill", found)
        assert found.mean_kl <= KV_BOUND.mean_kl and found.max_kl <= KV_BOUND.max_kl
        assert found.top1 >= KV_BOUND.top1 and found.top20 <= KV_BOUND.top20


def test_what_rounding_activations_to_fp8_costs(transformers_model: Any,
                                                record_property: Callable[[str, object], None]) -> None:
    """By transformers in float32, on prompts: the layers' weights in fp8, then what goes into their products, too, as
    `--activations fp8` rounds it (schedules/kernels/cuda/quantize_rows.py)."""
    import tokenizers
    import torch

    tokenizer = tokenizers.Tokenizer.from_str(open_checkpoint("smollm2").assets.files["tokenizer.json"].decode())
    prompts = [tokenizer.encode(PROMPTS[name], add_special_tokens=False).ids[:200] for name in DRIFT_PROMPTS]
    model = copy.deepcopy(transformers_model)

    def logits() -> np.ndarray:
        with torch.inference_mode():
            return np.concatenate([model(torch.tensor([ids])).logits[0].numpy() for ids in prompts])

    def rounded(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        largest = inputs[0].abs().amax(-1, keepdim=True).clamp(min=2.0**-110)
        codes = (inputs[0] * (448 / largest)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() * (largest / 448),)

    told = [logits()]
    linears = [module for name, module in model.named_modules()
               if isinstance(module, torch.nn.Linear) and ".layers." in name]
    for module in linears:
        weight = quantize(module.weight.detach().numpy(), FORMATS["fp8"]).dequantize()
        module.weight = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)
    told.append(logits())
    for module in linears:
        module.register_forward_pre_hook(rounded)
    told.append(logits())
    for name, before, mean, largest in (("with weights", 0, 0.06, 1.4), ("alone", 1, 0.025, 0.55)):
        found = drift(told[before], told[2])
        record_property(name, asdict(found))
        print("fp8 activations", name, found)
        assert found.mean_kl <= mean and found.max_kl <= largest and found.top1 >= 0.87


@pytest.mark.parametrize("weights", ["q4", "q8", "fp8"])
def test_what_is_as_coarse_already_stays(smollm2: Callable[[str], Path], weights: str) -> None:
    """So the drift of `as-is` is that of q4, q8 and fp8 for this checkpoint."""
    checkpoint = open_checkpoint("smollm2")
    assert choose_formats(checkpoint, weights) == choose_formats(checkpoint, "as-is")


def test_decode_equals_prefill_in_float32(told: Told) -> None:
    """The last tokens of a long sequence, one by one and in one step."""
    ids = [*told.ids["several pages"], *told.answers["several pages"]]
    whole, single = tapes(told.model.runner, [ids, ids])
    cut = len(ids) - 8
    run(told.model.runner, [single.step(cut, "none")])
    np.testing.assert_allclose(decode_logits(single, len(ids)), prefill_logits(whole, len(ids))[cut:], rtol=0, atol=2e-3)
