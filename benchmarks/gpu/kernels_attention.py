"""Checks and times the CUDA attention, RoPE+append and sampling kernels on one GPU, beside torch SDPA in the same run.

    python -m tests.helpers.attention_builds .carry/attention --tune        # anywhere with nvcc
    python -m benchmarks.gpu.kernels_attention .carry/attention --out DIR   # on the GPU, TVM runtime and torch only

Inputs rotate beyond L2 (a fresh layer of pages per call), times are graph replays, the ceiling is a plain read
measured first. Prints a table and writes DIR/attention-PARTS.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.gpu.attention_checks import check_attention, check_fused, check_rope, check_sampling, check_spread, sanitize
from benchmarks.gpu.attention_report import FAILURES, ROWS
from benchmarks.gpu.attention_times import read_bandwidth, time_decode, time_prefill, time_rope, time_sampling
from tests.helpers import attention_device as dev

PARTS = ("check_rope", "check_sample", "check_decode", "check_fused", "check_spread", "check_mma", "check_hopper",
         "decode", "prefill", "rope", "sample")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    args = parser.parse_args()
    parts = args.only.split(",")
    start = time.time()
    lib = dev.Library(args.folder)
    ceiling = read_bandwidth() if parts != ["sanitize"] else 0.0
    print(f"{torch.cuda.get_device_name()}: read {ceiling / 1e12:.2f} TB/s")
    steps = {"check_rope": lambda: check_rope(lib), "check_sample": lambda: check_sampling(lib),
             "check_decode": lambda: check_attention(lib, "decode", ""), "check_fused": lambda: check_fused(lib),
             "check_spread": lambda: check_spread(lib),
             "check_mma": lambda: check_attention(lib, "prefill", "mma"),
             "check_hopper": lambda: check_attention(lib, "prefill", "hopper"),
             "sanitize": lambda: sanitize(lib), "decode": lambda: time_decode(lib, ceiling, args.quick),
             "prefill": lambda: time_prefill(lib, args.quick),
             "rope": lambda: time_rope(lib, ceiling), "sample": lambda: time_sampling(lib)}
    for part in parts:
        try:
            steps[part]()
        except Exception as error:                         # a broken part must not hide the others' numbers
            import traceback

            traceback.print_exc()
            FAILURES.append(f"{part}: {type(error).__name__}: {str(error).splitlines()[0]}")
        print(f"-- {part}: {time.time() - start:.0f} s", flush=True)
    result = {"device": torch.cuda.get_device_name(), "read_bandwidth": ceiling, "torch": torch.__version__,
              "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "rows": ROWS, "failures": FAILURES}
    args.out.mkdir(parents=True, exist_ok=True)
    label = "all" if len(parts) == len(PARTS) else "-".join(parts)
    (args.out / f"attention-{label}.json").write_text(json.dumps(result, indent=1) + "\n")
    print("FAILURES:" if FAILURES else "all checks passed", *FAILURES, sep="\n")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    raise SystemExit(main())
