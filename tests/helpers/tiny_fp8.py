"""Writes small random-weight checkpoints in the fp8 schemes that public checkpoints use, from `tiny_checkpoints`.

Scales and codes are random, not quantised from something, so that every code and awkward scales occur; the embedding table,
the head and all vectors stay floats unless `table` says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from relaxpack.weight_format import E4M3
from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint, write_weights

_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True, "observer": None}


def _compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {},
            "transform_config": {}, "version": "0.11.0",
            "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": _ACTIVATIONS,
                                          "output_activations": None, "format": "float-quantized", "weights": {
                "num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, "actorder": None,
                "block_structure": None, "group_size": None, "observer": "minmax", "observer_kwargs": {}, **weights}}}}


_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
          "modules_to_not_convert": ["lm_head"]}

# name → (quantization_config, ending of the scales' names, shape of the scales, dtype of the scales)
SCHEMES: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "block": (_BLOCK, "_scale_inv", "block", ml_dtypes.bfloat16),
    "block of compressed-tensors": (_compressed("block", block_structure=[128, 128]), "_scale", "block", np.float32),
    "channel": (_compressed("channel"), "_scale", "channel", ml_dtypes.bfloat16),
    "tensor": (_compressed("tensor"), "_scale", "tensor", np.float32),
    "static": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "_scale", "scalar",
               np.float32)}


def scale_shape(kind: str, n: int, k: int) -> tuple[int, ...]:
    return {"tensor": (1,), "scalar": (), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]


def dequantized(codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    """float32 `[N, K]`, written out from the definition of each scheme."""
    values = E4M3[codes]
    if kind != "block":
        return values * scales.astype(np.float32)
    n, k = codes.shape
    rows, columns = np.arange(n) // 128, np.arange(k) // 128
    return values * scales.astype(np.float32)[rows[:, None], columns]


def write_fp8_checkpoint(folder: Path, scheme: str, family: str = "llama", *, seed: int = 0, table: bool = False,
                         **changes: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Writes the folder; returns all weights in float32 under their names, and the tensors as they are stored. `table`: the
    embedding is fp8 too, and the head if there is one."""
    quantization, ending, kind, dtype = SCHEMES[scheme]
    config = make_config(family, **changes)
    rng = np.random.default_rng(seed + 1)
    stored, plain = {}, {}
    for name, value in make_tensors(config, seed).items():
        if value.ndim != 2 or not (table or ".layers." in name):
            stored[name] = plain[name] = value
            continue
        n, k = value.shape
        codes = (value / np.abs(value).max() * 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes[0, ::3] = rng.integers(1, 8, len(codes[0, ::3]))         # subnormals
        codes[-1, :2] = 0x7E, 0xFE                                       # the largest of either sign
        shape = scale_shape(kind, n, k)
        scales = np.asarray(np.abs(value).max() / 448 * rng.uniform(0.7, 1.4, shape), dtype)
        plain[name] = dequantized(codes, scales, kind)
        stored[name] = codes.view(ml_dtypes.float8_e4m3fn)
        stored[name + ending] = scales
        if scheme == "static":
            stored[name.removesuffix("weight") + "input_scale"] = np.array(0.01, np.float32)
    write_checkpoint(folder, family, quantization_config=quantization, **changes)
    write_weights(folder, stored)
    return plain, stored
