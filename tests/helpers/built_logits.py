"""Logits of a tiny checkpoint from a bundle built of it for this CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.runtime.load import load_model
from tests.helpers.numerics import decode_logits, prefill_logits, tapes
from tests.helpers.tiny_checkpoints import VOCAB_SIZE

IDS = np.random.default_rng(2).integers(0, VOCAB_SIZE, 70).tolist()


def built_logits(checkpoint: Path, bundle: Path, weights: str) -> np.ndarray:
    """Logits [70, vocab] of IDS: 64 prefilled, 6 decoded; pages are float32, so that only the weights' format is seen."""
    build_bundle(checkpoint, bundle, options=BuildOptions(
        weights=weights, max_context=96, max_batch=2, prefill_chunk=64, kv_dtype="float32"))
    (tape,) = tapes(load_model(bundle).runner, [IDS])
    return np.concatenate([prefill_logits(tape, 64), decode_logits(tape, 70)])


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
