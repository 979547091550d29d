"""What the exported functions of a bundle take, and the number of that agreement. A build writes the number of the target's
kind into the manifest; a runtime compares it before it loads the library. Knows neither TVM nor bundles.

The number of a kind goes up with every change of functions, inputs, their order or meaning, or results, described in
docs/architecture.md. Bundles of before there were numbers have none.
"""

from __future__ import annotations

from collections.abc import Mapping

STEP_INTERFACE: Mapping[str, int] = {"cpu": 1, "cuda": 1}      # target kind → number

_PROMPTS = ("token_ids", "positions", "slots", "query_start", "lengths", "page_table")
_EMBED = (*_PROMPTS, "hidden_rows", "pages")
_PREFILL = (*_PROMPTS, "logit_rows", "pages")
_DECODE = ("token_ids", "positions", "slots", "lengths", "page_table")
_SAMPLING = ("settings", "counters", "counts", "drawn")
# Target kind → function → its inputs in order; the tuple of parameters comes behind them.
STEP_INPUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {"prefill": _PREFILL, "decode": (*_DECODE, "pages"), "embed": _EMBED},
    "cuda": {"prefill": _PREFILL, "decode": (*_DECODE, "token_source", *_SAMPLING, "pages"), "embed": _EMBED,
             "sample": ("logits", *_SAMPLING, "allowed"), "top_logprobs": ("logits", "counters")},
}


def missing_functions(kind: str, functions: tuple[str, ...]) -> list[str]:
    """What a runtime calls of a library for this kind of target that is not among its functions. Only `embed` may be
    absent, or everything else."""
    generating = [name for name in STEP_INPUTS.get(kind, {}) if name != "embed"]
    return [name for name in generating if name not in functions] if functions != ("embed",) else []
