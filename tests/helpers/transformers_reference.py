"""The reference of checkpoints: what transformers computes with them on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits [ids, vocab] of transformers' model in float32; the test is skipped where it is not installed."""
    torch = pytest.importorskip("torch", reason="reference: pip install --group reference")
    transformers = pytest.importorskip("transformers", reason="reference: pip install --group reference")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()
