"""The CUDA C++ of the tunable kernels, for a sample of each family: by it a test sees that a family has changed. Digests as
they were last agreed upon are in `kernel_texts.json`; after a change of kernels

    python -m tests.helpers.kernel_texts

writes those of today, for families whose number in `relaxpack/kernel_generations.py` has been raised (and for new ones).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from relaxpack.kernel_generations import GENERATIONS
from relaxpack.kernel_spec import AttentionSpec, FusedAttentionSpec, LinearSpec, NormSpec
from relaxpack.model_info import FP8
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.weight_format import FORMATS
from tests.helpers.cuda_harness import generate_source

PATH = Path(__file__).with_suffix(".json")
TARGET = parse_target("cuda:sm_90a")
FAMILIES = tuple(name for name in GENERATIONS if name.startswith("cuda."))
ATTENTION = AttentionSpec(16, 8, 2, 64, 64, 16, 256, 4096, "bfloat16", "bfloat16", 0.125)
RULE: dict[str, Any] = {}


def sample(family: str) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """(spec, choice): the rule's and, of matmuls, each of the kernels that may be chosen."""
    if family == "cuda.linear":
        for rows, choice in ((1, RULE), (16, RULE), (512, RULE), (512, {"family": "gemm_many", "tile_n": 64, "cluster": 2})):
            yield LinearSpec(1024, 2048, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=rows), choice
    elif family.startswith("cuda.linear_quantized"):
        samples = (("q4_1", 1, RULE), ("q4_0", 8, RULE), ("q8_0", 8, RULE), ("q4_0", 512, RULE))
        few = (("q4_1", 16, RULE), ("q4_1", 32, RULE), ("q4_0", 32, RULE), ("fp8", 128, RULE),
               ("q4_1", 64, {"family": "gemm_mixed", "columns": 64, "strips": 1, "consumers": 2, "split": 1,
                             "blocks_per_sm": 1}),
               ("q8_0", 16, {"family": "gemm_few_quant", "columns": 16, "strips": 1, "warps": 8, "split": 1}))
        for weight, rows, choice in few if family.endswith("_few") else samples:
            yield LinearSpec(1024, 2048, FORMATS[weight], "decode", "bfloat16", "bfloat16", max_rows=rows), choice
    elif family == "cuda.norm":
        for many in (False, True):
            yield NormSpec(4096, 1e-5, "bfloat16", True, many), RULE
    elif family == "cuda.rope_append_attention":
        for rows in (1, 64):
            yield FusedAttentionSpec(ATTENTION, rows), RULE
    else:
        yield ATTENTION, RULE
        if family == "cuda.prefill_attention":
            yield replace(ATTENTION, kv_dtype=FP8), RULE


def digest_of(family: str) -> str:
    make, found = families_for(TARGET)[family.removesuffix("_few").removesuffix("_quantized")].make, hashlib.sha256()
    for spec, choice in sample(family):
        stages = make(spec, choice).stages              # whatever they are called
        found.update(generate_source({f"k{i}": stage.func for i, stage in enumerate(stages)}, TARGET.arch).encode())
    return found.hexdigest()


def agreed() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
    return known


def main() -> int:
    known = agreed() if PATH.exists() else {}
    for family in FAMILIES:
        text, before = digest_of(family), known.get(family)
        if before is not None and text != before["text"] and before["generation"] == GENERATIONS[family]:
            print(f"{family} has changed: raise its number in relaxpack/kernel_generations.py first")
            return 1
        known[family] = {"generation": GENERATIONS[family], "text": text}
    PATH.write_text(json.dumps(known, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
