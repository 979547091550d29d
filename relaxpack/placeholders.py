"""Names of the placeholder operations: calls that say what is computed, until `passes/lower_kernels.py` puts kernels in
their place. A placeholder is a `relax.call_dps_packed` of one of these names; operands stand where it is made.
"""

from __future__ import annotations

# Written by models: no Relax operation says these.
PREFILL_ATTENTION = "relaxpack.prefill_attention"
DECODE_ATTENTION = "relaxpack.decode_attention"
SAMPLE = "relaxpack.sample"
TOP = "relaxpack.top_logprobs"
# Made by passes out of Relax operations.
UNPACK = "relaxpack.unpack"                # packed buffers → float weight; never lowered, fusion removes it
LINEAR = "relaxpack.linear"                # with "+bias", "+residual", "+swiglu" or "+geglu" behind it
EMBEDDING = "relaxpack.embedding"
RMS_NORM = "relaxpack.rms_norm"
ADD_RMS_NORM = "relaxpack.add_rms_norm"
HEAD_SAMPLE = "relaxpack.head_sample"      # a linear layer whose logits are sampled; with "+norm" behind it
ROPE_APPEND_ATTENTION = "relaxpack.rope_append_attention"   # decode attention that is one kernel
SPREAD_ATTENTION = "relaxpack.spread_attention"             # decode attention that reads shared leading pages once

# Attribute of a function that reads what another one has returned: results of captured functions lie in the arena that all
# functions share, so that its own intermediates must not.
READS_RESULTS = "relaxpack.reads_results"

# Gated linear units, f(gate) * up, by what is behind a LINEAR: the Relax operation f.
GLU = {"swiglu": "relax.nn.silu", "geglu": "relax.nn.gelu_tanh"}
