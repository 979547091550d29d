"""GGUF files run through the NumPy reference, against llama.cpp: row order, RoPE metadata and block decoding at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.checkpoint import open_checkpoint, packaged_file
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.reference.numpy_decoder import forward

pytest.importorskip("gguf", reason="writes the test files: pip install relaxpack[gguf]")
llama_cpp = pytest.importorskip("llama_cpp", reason="reference: pip install llama-cpp-python")

from tests.helpers.tiny_gguf import write_gguf

LENGTH = 300
F32 = 0  # ggml's number of the type, for llama.cpp's cache


def scaling(architecture: str = "llama", **keys: Any) -> dict[str, Any]:
    return {f"{architecture}.rope.scaling.{key}": value for key, value in keys.items()}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray]]] = {
    "llama": ("llama", {}, {}),
    "head_dim": ("head_dim", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma": ("gemma", {}, {}),
    "linear": ("llama", scaling(type="linear", factor=4.0), {}),
    "yarn": ("llama", scaling(type="yarn", factor=4.0, original_context_length=128), {}),
    "llama3 factors": ("llama", {}, {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}),
}


def llama_logits(path: Path, ids: list[int]) -> np.ndarray:
    model = llama_cpp.Llama(model_path=str(path), logits_all=True, verbose=False, n_ctx=len(ids) + 8, n_threads=1,
                            n_threads_batch=1, type_k=F32, type_v=F32, flash_attn=False)
    model.eval(ids)
    return np.array(model.scores[:len(ids)], np.float32)


@pytest.mark.parametrize("name", CASES)
def test_float_files(tmp_path: Path, name: str) -> None:
    family, metadata, extra = CASES[name]
    folder = write_checkpoint(tmp_path / "hf", family, seed=4, max_position_embeddings=512)
    path = write_gguf(tmp_path / "m.gguf", folder, replace_metadata=metadata, extra_tensors=extra)
    ids = np.random.default_rng(6).integers(0, VOCAB_SIZE, LENGTH).tolist()
    expected = llama_logits(path, ids)
    got = forward(open_checkpoint(path), ids, 512)
    assert np.isfinite(expected).all() and expected.std() > 0.5
    np.testing.assert_allclose(got, expected, atol=5e-3)


def test_smollm2() -> None:
    """The real model. llama.cpp rounds activations to 8 bits before each quantised product, so log-probabilities of
    likely tokens drift by tenths; a wrong row order or scale would move them by several units."""
    try:
        checkpoint = open_checkpoint("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    tokenizer = Tokenizer.from_str(checkpoint.assets.files["tokenizer.json"].decode())
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    expected, got = llama_logits(packaged_file("smollm2"), tokens), forward(checkpoint, tokens, 2048)
    logprobs = [x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
                for x in (expected, got)]
    likely = np.argsort(-logprobs[0][-1])[:20]
    assert likely[0] == np.argmax(logprobs[1][-1])
    assert np.abs(logprobs[0][-1, likely] - logprobs[1][-1, likely]).max() < 0.6
