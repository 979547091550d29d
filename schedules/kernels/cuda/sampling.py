"""Sampling on the GPU: logits to token ids without a sort and without the host, in two kernels: a scan by many blocks a row,
and a pick by one. A draw is the largest of -distance + Gumbel noise over the kept tokens, where the distance is that to
the largest logit and noise comes from Philox4x32-10 with key (seed) and counter (token / 4, position).

With a filter set, tokens less likely than e^-32 times the likeliest are never drawn. The floor is two reads of the
logits.
"""

from __future__ import annotations

from relaxpack.kernel_spec import Kernel, SamplingSpec, Stage
from relaxpack.schedules.kernels.cuda.fragments import early_launch, finish
from relaxpack.schedules.kernels.cuda.sampling_pick import sample_pick_function
from relaxpack.schedules.kernels.cuda.sampling_scan import PART_TOPS, sample_scan_function, scan_blocks


def sample(spec: SamplingSpec, arch: str = "sm_90a") -> Kernel:
    """logits f32[b, V], settings f32[b, 8], counters i32[b, 8], counts i32[c, V + 512] (in place), [allowed i32[m, V/32]],
    drawn i32[b or more, 2] (in place): token ids and the bits of their float32 log-probabilities."""
    early = early_launch(arch)
    scan = finish(sample_scan_function(spec, early), early, "xy")
    pick = finish(sample_pick_function(spec, early), early)
    masked = ("allowed",) if spec.constrained else ()
    name = f"sample_v{spec.vocab_size}" + ("_constrained" if masked else "")
    given = ("logits", "settings", "counters", "counts", *masked)
    blocks = scan_blocks(spec.vocab_size)
    return Kernel((Stage(scan, name + "_scan", inputs=given, outputs=("sums", "picks", "tops")),
                   Stage(pick, name + "_pick", inputs=(*given, "sums", "picks", "tops", "drawn"), outputs=(),
                         inplace=("counts", "drawn"))),
                  source="rule:cuda.sample",
                  temporaries={"sums": (("b", blocks, 5), "float32"), "picks": (("b", blocks, 3), "int32"),
                               "tops": (("b", blocks * PART_TOPS), "float32")})
