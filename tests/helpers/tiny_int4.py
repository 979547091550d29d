"""Writes small random-weight checkpoints in the 4-bit formats of AWQ, GPTQ and compressed-tensors, from `tiny_checkpoints`,
by packers of their own.

Codes, zeros and scales are random, not quantised from something, so that every code and zero occurs. The embedding table,
the head and all vectors stay floats.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint, write_weights

AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "backend": "autoawq",
       "modules_to_not_convert": None, "do_fuse": False, "exllama_config": {"version": 2}}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False, "damp_percent": 0.01, "true_sequential": True,
        "static_groups": False, "model_name_or_path": None, "model_file_base_name": "model", "checkpoint_format": "gptq",
        "dynamic": {"-:.*lm_head.*": {}}, "meta": {"quantizer": ["somebody:1.0"]}}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False, "dynamic": False, "actorder": None,
            "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
              "global_compression_ratio": 1.9, "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": {
                  "targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": _WEIGHTS}}}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": AWQ, "gptq": GPTQ, "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"}, "compressed": COMPRESSED}


def joined(numbers: np.ndarray, order: tuple[int, ...], axis: int) -> np.ndarray:
    """Eight neighbours along `axis` in one int32: the nibble at bit 4i holds number order[i]."""
    columns = np.moveaxis(numbers, axis, -1)
    words = np.zeros((*columns.shape[:-1], columns.shape[-1] // 8), np.uint32)
    for i, place in enumerate(order):
        for word in range(words.shape[-1]):
            words[..., word] += columns[..., word * 8 + place].astype(np.uint32) << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def stored_layer(kind: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a layer, whose names follow its own. codes `[K, N]`, zeros and scales `[groups, N]`."""
    natural = tuple(range(8))
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": joined(codes, order, 1), "qzeros": joined(zeros, order, 1), "scales": scales}
    if kind == "compressed":
        return {"weight_packed": joined(codes.T, natural, 1), "weight_zero_point": joined(zeros.T, natural, 0),
                "weight_scale": np.ascontiguousarray(scales.T), "weight_shape": np.array(codes.T.shape)}
    less = 1 if kind == "gptq" else 0
    inputs, groups = len(codes), len(zeros)
    return {"qweight": joined(codes, natural, 0), "qzeros": joined((zeros - less) % 16, natural, 1), "scales": scales,
            "g_idx": (np.arange(inputs) // (inputs // groups)).astype(np.int32)}


def write_int4_checkpoint(
        folder: Path, kind: str, family: str = "llama", *, group: int = 128, seed: int = 0, scale_dtype: Any = np.float16,
        **changes: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Writes the folder; returns all weights in float32 under their names, and the tensors as they are stored. `kind`: a
    name of CONFIGS; `group`: -1 for one group of all inputs."""
    config = make_config(family, **changes)
    rng = np.random.default_rng(seed + 1)
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, value in make_tensors(config, seed).items():
        if value.ndim != 2 or ".layers." not in name:
            stored[name] = plain[name] = value
            continue
        outputs, inputs = value.shape
        size = inputs if group == -1 else group
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // size, outputs))
        scales = (inputs**-0.5 * rng.uniform(0.1, 0.2, zeros.shape)).astype(scale_dtype)
        numbers = (codes - np.repeat(zeros, size, axis=0)) * np.repeat(scales.astype(np.float32), size, axis=0)
        plain[name] = np.ascontiguousarray(numbers.T, np.float32)
        layer = name.removesuffix("weight")
        stored.update({layer + part: array for part, array in stored_layer(kind, codes, zeros, scales).items()})
    config = copy.deepcopy(CONFIGS[kind])
    if kind == "compressed":
        sizes = {"group_size": group} if group != -1 else {"group_size": None, "strategy": "channel"}
        config["config_groups"]["group_0"]["weights"].update(sizes)
    else:
        config["group_size"] = group
    write_checkpoint(folder, family, quantization_config=config, **changes)
    write_weights(folder, stored)
    return plain, stored
