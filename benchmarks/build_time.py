"""How long a build takes and where it goes, for published shapes without weights: passes, code, linking.

    python benchmarks/build_time.py [--model Llama-3.2-1B] [--target cpu] [--target cuda:sm_90a] [--passes 5]

Nothing is tuned or packed. A process that has built before has the kernels' Python code compiled and TVM's libraries loaded,
so each build gets a process of its own; its import of TVM is shown apart. On a busy machine the seconds of processors (the
compilers' included) say more than the clock.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def build(model: str, target: str, shown: int) -> None:
    start = time.perf_counter()
    from relaxpack.compile.kernels import kernel_provider
    from relaxpack.compile.lowering import lower_model
    from relaxpack.compile.options import pipeline_config
    from relaxpack.relax_models.export import BuildLimits
    from relaxpack.target import parse_target
    from tests.helpers.model_shapes import SHAPES, formats_of

    imported = time.perf_counter()
    config, spec, limits = SHAPES[model], parse_target(target), BuildLimits(4096)
    cpu = spec.kind == "cpu"
    formats = formats_of(config, "q8_0", "q4_1") if cpu else formats_of(config, "bf16", "bf16")
    activation, kv = ("float32", "float16") if cpu else ("bfloat16", "bfloat16")
    lowered = lower_model(config, limits, spec, kernel_provider(spec), formats, activation, kv,
                          pipeline_config(spec, limits))
    compiled = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "model.so"
        lowered.executable.export_library(str(library), workspace_dir=folder)
        size = library.stat().st_size
    end = time.perf_counter()
    phases = ", ".join(f"{p['phase']} {p['seconds']:.1f}" for p in lowered.explanation["phases"])
    used = sum(getattr(resource.getrusage(who), kind) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
               for kind in ("ru_utime", "ru_stime"))
    print(f"{model}, {target}: {end - start:.1f} s, of processors {used:.1f} s (import {imported - start:.1f}, {phases}, "
          f"linking {end - compiled:.1f}); {size / 1e6:.1f} MB, {len(lowered.explanation['kernels'])} PrimFuncs", flush=True)
    slowest = sorted(lowered.explanation["passes"], key=lambda p: -p["seconds"])[:shown]
    print("    passes: " + ", ".join(f"{p['name']} {p['seconds']:.1f}" for p in slowest), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append")
    parser.add_argument("--target", action="append")
    parser.add_argument("--passes", type=int, default=5, help="slowest passes to name")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "TARGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        build(*args.one, args.passes)
        return
    for target in args.target or ["cpu", "cuda:sm_90a"]:
        for model in args.model or ["Llama-3.2-1B"]:
            subprocess.run([sys.executable, __file__, "--one", model, target, "--passes", str(args.passes)], check=True)


if __name__ == "__main__":
    main()
