"""What the compiler asks of kernels, and the form in which kernels answer. Shared by passes (who ask) and
schedules (who answer); neither imports the other.

A `Kernel` is one or more PrimFuncs ("stages") over named buffers. The lowering pass turns every stage into one
`call_tir` (or `call_tir_inplace` where a stage writes `pages`); temporaries become planned intermediates. All
activations are row-major; rows are the symbolic int64 variable `t` (tokens of a step), sequences are `b`.

Buffer names and types by operation (I = activation dtype of the spec, inputs first, then outputs):

    (A weight packed into several buffers is named `weight.<suffix>`, one name per buffer of its WeightLayout.)

    linear       x I[t, K], weight (packed, see WeightLayout), [bias f32[N]], [residual I[t, N]], [norm_weight f32[N]],
                 [squares f32[t, K/16]] → y O[t, N], [scaled I[t, N], squares f32[t, N/16]]; with glu: N counts gate and
                 up rows together and y is O[t, N/2]
    embedding    token_ids i32[t], weight (packed) → y I[t, H], times EmbeddingSpec.factor
    rms_norm     x I[t, H], weight f32[H] → y I[t, H]
    add_rms_norm x I[t, H], residual I[t, H], weight f32[H] → total I[t, H], y I[t, H]
    rope_append  qkv I[t, (H+2KV)*D], rope_table f32[max_position, rotary_dim] (cos | sin halves), positions i32[t],
                 slots i32[t], [q_norm f32[D], k_norm f32[D]], pages → (in place) pages, q I[t, H*D]
    decode_attention   q I[t, H*D], pages, page_table i32[t, max_pages], lengths i32[t] → y I[t, H*D]
    rope_append_attention   inputs of rope_append, page_table i32[t, max_pages], lengths i32[t]
                       → (in place) pages, y I[t, H*D]; a stage may have page table and lengths read, and keys of
                       earlier steps, before the kernels ahead of it are complete
    prefill_attention  q I[t, H*D], pages, page_table i32[b, max_pages], query_start i32[b+1], lengths i32[b]
                       → y I[t, H*D]
    sample       logits f32[b, V], settings f32[b, 8], counters i32[b, 8], counts i32[c, V + 512],
                 [allowed i32[m, V/32]]
                 → (in place) counts, drawn i32[b or more, 2]; columns of settings and counters: SamplingSpec
    head_sample  the inputs of linear, then those of sample but logits; what the kernel keeps (`Kernel.persistent`)
                 → (in place) what is kept, counts, drawn; y f32[b, V]
    top_logprobs logits f32[b, V], counters i32[b, 8] → top_ids i32[b, 20], top_logprobs f32[b, 20]: of each row as many of
                 the likeliest tokens as its counter `tops` says, likeliest first, the lower id of equal ones

`pages` is kv_dtype[num_layers, num_pages, 2, num_kv_heads, page_size, head_dim] (2 = keys, values; keys after RoPE; the
buffer of float8_e4m3fn is uint8, what is written is rounded to even and at most 448, and NaN reads as 480);
`num_pages` is the symbolic variable `p`. Stages that touch `pages` take the layer as a scalar int64 parameter named
`layer`. slot = page_id * page_size + offset. `lengths` counts the tokens of a sequence including those of this step;
query i of sequence s (row query_start[s] + i) sits at position lengths[s] - (query_start[s+1] - query_start[s]) + i
and attends to keys at positions <= its own (and > own - window where the model has a sliding window).
Page 0 is scratch: padded rows point at it and it never holds a live token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from relaxpack.model_info import FP8, kv_item_bytes, page_dtype
from relaxpack.spread_costs import SpreadCosts
from relaxpack.weight_format import QuantizedTensor, WeightFormat

NORM_GROUP = 16  # features whose squares are one number of `squares`
MANY_ROWS = 512  # of a norm: what counts as many
Dim = int | str  # a constant or the name of a symbolic variable ("t", "b", "p")


@dataclass(frozen=True)
class WeightLayout:
    """How a kernel wants a weight: packed buffers (name suffix → shape, dtype) and the packer that makes them.
    Layouts compare equal exactly when the bytes are interchangeable."""

    name: str                                            # e.g. "cpu.q4_panel16"
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]  # (suffix, shape, dtype); suffix "" for the only one


@dataclass(frozen=True)
class LinearSpec:
    """y = x W^T [+ bias] [+ residual]; with `glu` y = f(x Wg^T) * (x Wu^T) [+ residual], the bias inside, f = silu for
    "swiglu" and GELU with the tanh approximation for "geglu"."""

    out_features: int            # N, gate and up together where glu
    in_features: int             # K
    weight: WeightFormat
    phase: str                   # "decode": few rows (1..max_batch); "prefill": many
    activation_dtype: str
    out_dtype: str
    bias: bool = False
    residual: bool = False
    glu: str | None = None       # "swiglu" | "geglu"
    max_rows: int | None = None  # decode functions of a bucket: rows are at most (in fact exactly) these
    # An RMSNorm between matmuls needs no kernel. The one before it gives, besides y, `scaled` = norm_weight * y rounded once
    # and `squares`, sums over NORM_GROUP features of y^2 as stored. The one after it takes `scaled` for x, and its x W^T is
    # multiplied by 1 / sqrt(mean + norm_epsilon) before anything is added. Ask `KernelProvider.folds_norm` first.
    prepares_norm: bool = False          # with residual
    norm_epsilon: float | None = None

    def without_norm(self) -> LinearSpec:
        """The product that a kernel with a norm stands for, as it is where the norm has its own kernel."""
        if self.prepares_norm:
            return replace(self, prepares_norm=False, residual=False)
        return replace(self, norm_epsilon=None)

    @property
    def gated(self) -> bool:
        """Gate and up rows are packed together."""
        return self.glu is not None

    def recorded(self) -> dict[str, Any]:
        """The facts as tuning records name them: records are older than GeGLU and the norms (see `without_norm`)."""
        facts = asdict(self.without_norm())
        glu = facts.pop("glu")
        del facts["prepares_norm"], facts["norm_epsilon"]
        return facts | {"swiglu": glu == "swiglu"} | ({"geglu": True} if glu == "geglu" else {})

    @classmethod
    def from_recorded(cls, facts: dict[str, Any]) -> LinearSpec:
        """The inverse; `weight` is the format itself already."""
        facts = dict(facts)
        swiglu, geglu = facts.pop("swiglu"), facts.pop("geglu", False)
        return cls(**facts, glu="swiglu" if swiglu else "geglu" if geglu else None)


@dataclass(frozen=True)
class EmbeddingSpec:
    vocab_size: int
    hidden_size: int
    weight: WeightFormat
    activation_dtype: str
    factor: float = 1.0


@dataclass(frozen=True)
class NormSpec:
    hidden_size: int
    epsilon: float
    activation_dtype: str
    residual: bool               # True: add_rms_norm
    many_rows: bool = False      # a prefill of MANY_ROWS or more, or of any number; else few, or of a decode step

    @property
    def phase(self) -> str:
        """Whose numbers of rows the kernel is tuned for."""
        return "prefill" if self.many_rows else "decode"

    def recorded(self) -> dict[str, Any]:
        """The facts as tuning records name them: records are older than `many_rows`."""
        facts = asdict(self)
        return facts if facts["many_rows"] else {name: fact for name, fact in facts.items() if name != "many_rows"}


# `shared` i32[t] of decode attention: how many leading keys a row has in common with the others in which this is not 0. The
# number is the same for all of these, smaller than their lengths, and a multiple of SHARED_KEYS, which tiles divide.
SHARED_KEYS = 256


@dataclass(frozen=True)
class AttentionSpec:
    """rope_append and both attentions."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    max_pages: int               # columns of page_table
    max_position: int            # rows of rope_table
    activation_dtype: str
    kv_dtype: str
    scale: float
    window: int | None = None    # keys a query sees, itself included; None = all
    qk_norm_epsilon: float | None = None

    @property
    def fp8(self) -> bool:
        """Keys and values are stored as e4m3 numbers."""
        return self.kv_dtype == FP8

    @property
    def page_dtype(self) -> str:
        return page_dtype(self.kv_dtype)

    @property
    def kv_item_bytes(self) -> int:
        return kv_item_bytes(self.kv_dtype)


@dataclass(frozen=True)
class FusedAttentionSpec:
    """rope_append_attention of a decode step of exactly `rows` rows."""

    attention: AttentionSpec
    rows: int

    @property
    def max_rows(self) -> int:
        return self.rows


@dataclass(frozen=True)
class SamplingSpec:
    """One token per row, on the device. Per row `settings` holds SAMPLING_SETTINGS and `counters` SAMPLING_COUNTERS, each
    padded to 8 columns. temperature 0 is greedy (the lowest id of equal logits); top_k 0, top_p 1, min_p 0, typical_p 1,
    repetition 1, presence 0 and frequency 0 are off. Order: penalties, bias, mask, temperature, top_k, top_p over what
    top_k kept, min_p against the likeliest, typical_p over what is left; equal logits at a border all stay.

    `counts[counts_row]` has a word for each token: how often the output has it (the lowest COUNT_BITS bits), the number
    of its edit (the next EDIT_BITS bits; 0: none), and IN_PROMPT. Behind these come 2^EDIT_BITS words: the token drawn
    last, its position (-1: none yet), and from word FIRST_EDIT on the edits, float32 numbers that are added to the
    logits (-inf: a ban). The kernel counts the drawn token; where it finds that a token was drawn for the same position
    before (by a step whose result was dropped), it takes that one back. counts_row -1: none of this.
    `allowed[mask_row]` (only where `constrained`; mask_row -1: everything) has one bit per token. The counter
    `tops` is for top_logprobs.

    The draw depends on (seed_low, seed_high, position, logits of the row) alone. A row with NaN or +inf, or with nothing
    but -inf, gives token -1, one in which no token is allowed -2, both with logprob NaN. logprobs are those of the raw
    logits, before any setting. A row of `drawn` is the token and the bits of its float32 logprob."""

    vocab_size: int
    constrained: bool = False


SAMPLING_SETTINGS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "typical_p")
SAMPLING_COUNTERS = ("top_k", "seed_low", "seed_high", "position", "counts_row", "mask_row", "tops")
COUNT_BITS, EDIT_BITS, IN_PROMPT = 20, 9, 1 << 30
FIRST_EDIT = 2
TOP_LOGPROBS = 20       # likeliest tokens that a device tells


def counts_width(vocab_size: int) -> int:
    return vocab_size + (1 << EDIT_BITS)


@dataclass(frozen=True)
class Stage:
    """One PrimFunc. `inputs` and `outputs` name the buffers in parameter order (inputs, then outputs). A stage that
    writes pages lists "pages" among its inputs and in `inplace`; "layer" among the inputs is the scalar.

    `overwrites` lists (input, output) pairs of one type: where the input dies in this call, the output may be given the
    very same bytes. True of a kernel whose only read of these bytes comes before the write, in the same thread; it
    must not promise the compiler that its buffers never alias (no `tirx.noalias`)."""

    func: Any                    # tvm.tirx.PrimFunc, scheduled, attrs tirx.is_scheduled and op_pattern 8
    name: str                    # readable and unique per distinct PrimFunc, e.g. "linear_q4_1_576x960_decode"
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    inplace: tuple[str, ...] = ()
    overwrites: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Kernel:
    stages: tuple[Stage, ...]
    source: str                  # "rule:<name>", "tuned:<record id>", "dlight", "library:<name>", "fallback"
    temporaries: dict[str, tuple[tuple[Dim, ...], str]] = field(default_factory=dict)  # name → (shape, dtype)
    # Inputs of zeros that live as long as the weights; a kernel writes to them and leaves them as it found them.
    persistent: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


class KernelProvider(Protocol):
    """Answers the compiler's questions for one target. Deterministic: equal questions, equal answers."""

    def weight_layout(self, weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
        """Raises CompileError where the format cannot be served (e.g. K not a multiple of the group)."""

    def pack(self, layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
        """Canonical weight `[N, K]` → packed buffers by suffix. With `gated` the rows are gate then up, stacked."""

    def linear(self, spec: LinearSpec) -> Kernel: ...

    def folds_norm(self, spec: LinearSpec) -> bool:
        """Whether `linear` answers this spec, which prepares or applies a norm, and that is the faster way."""

    def require_attention(self, spec: AttentionSpec) -> None:
        """Raises CompileError, before anything is made, where no kernel serves these sizes and dtypes."""

    def embedding(self, spec: EmbeddingSpec) -> Kernel: ...
    def norm(self, spec: NormSpec) -> Kernel: ...
    def rope_append(self, spec: AttentionSpec) -> Kernel: ...
    def decode_attention(self, spec: AttentionSpec) -> Kernel: ...
    def prefill_attention(self, spec: AttentionSpec) -> Kernel: ...

    def spread_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        """`decode_attention` of exactly `rows` rows that may have leading keys in common (input `shared`, see SHARED_KEYS)
        or differ much in length; None where there is no such kernel."""

    def spread_costs(self, spec: AttentionSpec, rows: int) -> SpreadCosts:
        """When it is the faster way, where `spread_attention` has an answer."""
        ...

    def rope_append_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        """Both of a decode step of exactly `rows` rows in one kernel; None where two are better or there is none."""

    def sample(self, spec: SamplingSpec) -> Kernel:
        """Raises CompileError for targets that sample on the host (CPUs)."""
        ...

    def top_logprobs(self, vocab_size: int) -> Kernel:
        """As `sample`."""

    def head_sample(self, spec: LinearSpec, sampling: SamplingSpec) -> Kernel | None:
        """None where two kernels are better or there is no such kernel."""
