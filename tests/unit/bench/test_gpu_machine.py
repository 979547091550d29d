"""The halves of the GPU benchmarks that run where the GPU is: TVM's compiler is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ("against_transformers", "attention_checks", "attention_times", "check_bundle", "decode_attention", "fp8_matmul",
           "fused_attention", "head_sample", "kernels_attention", "kernels_matmul", "kv_fp8", "matmul_bench", "matmul_turns",
           "norm_fusion", "prefill_attention", "quantised_matmul", "random_bundle", "run_models", "sampling_steps",
           "serve_peers", "shared_steps", "timeline", "tune", "tune_device", "tuned_steps", "visit", "visit_sections")
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"benchmarks.gpu.{name}")
    print(name)
"""


def test_they_import_nothing_that_needs_the_compiler() -> None:
    pytest.importorskip("torch")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks" / "gpu")])      # as scripts they find each other
    done = subprocess.run([sys.executable, "-c", PROGRAM, *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": paths, "TVM_USE_RUNTIME_LIB": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(SCRIPTS)
