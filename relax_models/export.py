"""Config → IRModule with the exported functions `prefill`, `decode` and `embed` over symbolic shapes. The export spec
stands here once for all families; see docs/architecture.md, "Step functions".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import counts_width
from relaxpack.model_info import page_dtype
from relaxpack.placeholders import DECODE_ATTENTION, PREFILL_ATTENTION, READS_RESULTS
from relaxpack.relax_models import ops
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.decoder import Decoder, StepInputs
from relaxpack.relax_models.rope import inv_freq
from tvm import relax


@dataclass(frozen=True)
class BuildLimits:
    """Upper bounds the functions are planned for."""

    max_context: int
    max_batch: int = 8
    prefill_chunk: int = 512
    page_size: int = 16

    @property
    def max_pages(self) -> int:
        return -(-self.max_context // self.page_size)


def export_model(config: ModelConfig, limits: BuildLimits, dtype: str, kv_dtype: str,
                 device_sampling: bool = False, generate: bool = True, embed: bool = False) -> tvm.IRModule:
    """The module of float weights: parameters after `num_input` are named as in the checkpoint and have `dtype`.

    `generate`: `prefill` and `decode`. With `device_sampling` `decode` also samples (its result is logits and what was
    drawn) and may take the tokens of the last step from the device, and `sample` does the same for given logits: those of
    a prefill, or of a decode whose rows have masks of allowed tokens; `top_logprobs` finds the likeliest tokens of given
    logits. `embed`: the function of that name, a prefill that ends at the last hidden states.
    """
    assert generate or embed, "a module of no functions"
    builder = relax.BlockBuilder()
    exporter = _Exporter(builder, config, limits, dtype, kv_dtype, device_sampling)
    if generate:
        exporter.generate()
    if embed:
        exporter.embed()
    return builder.get()


def _tensor(name: str, dtype: str, *shape: object) -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), dtype))


class _Exporter:
    def __init__(self, builder: relax.BlockBuilder, config: ModelConfig, limits: BuildLimits, dtype: str, kv_dtype: str,
                 device_sampling: bool) -> None:
        self.builder, self.config, self.limits = builder, config, limits
        self.dtype, self.kv_dtype, self.device_sampling = dtype, kv_dtype, device_sampling

    def generate(self) -> None:
        # On a GPU the engine asks for at most a batch of logit rows, since they stay in the planned memory.
        rows = self.limits.max_batch if self.device_sampling else self.limits.prefill_chunk
        self._prompts("prefill", "logit_rows", rows, Decoder.__call__)
        self._decode()
        if self.device_sampling:
            self._sample()
            self._top_logprobs()

    def embed(self) -> None:
        """A mean over a prompt reads every row, so as many as tokens."""
        self._prompts("embed", "hidden_rows", self.limits.prefill_chunk, Decoder.hidden_states)

    def _pages(self) -> relax.Var:
        c, p = self.config, tvm.tirx.Var("p", "int64")
        dtype = page_dtype(self.kv_dtype)
        return _tensor("pages", dtype, c.num_layers, p, 2, c.num_kv_heads, self.limits.page_size, c.head_dim)

    def _prompts(self, name: str, rows_name: str, max_rows: int,
                 result: Callable[[Decoder, ops.Graph, StepInputs], ops.Expr]) -> None:
        """A function over tokens of several sequences, packed one behind the other; a result for some of the rows."""
        t, b, r = (tvm.tirx.Var(n, "int64") for n in "tbr")
        inputs = [*(_tensor(n, "int32", t) for n in ("token_ids", "positions", "slots")),
                  _tensor("query_start", "int32", b + 1), _tensor("lengths", "int32", b),
                  _tensor("page_table", "int32", b, self.limits.max_pages), _tensor(rows_name, "int32", r),
                  self._pages()]
        bounds = {"t": self.limits.prefill_chunk, "b": self.limits.max_batch, "r": max_rows}
        token_ids, positions, slots, query_start, lengths, page_table, rows, pages = inputs
        decoder = Decoder(self.config, self.dtype)

        def body(graph: ops.Graph) -> ops.Expr:
            integers = [self._rope_table(graph), positions, slots, page_table, query_start, lengths]
            return result(decoder, graph, StepInputs(token_ids, pages, integers, PREFILL_ATTENTION, rows))

        self._function(name, inputs, bounds, decoder, body)

    def _decode(self) -> None:
        t = tvm.tirx.Var("t", "int64")
        inputs = [*(_tensor(n, "int32", t) for n in ("token_ids", "positions", "slots", "lengths")),
                  _tensor("page_table", "int32", t, self.limits.max_pages)]
        token_ids, positions, slots, lengths, page_table = inputs
        pages = self._pages()
        decoder = Decoder(self.config, self.dtype)
        if self.device_sampling:
            source, sampling = _tensor("token_source", "int32", t), self._sampling_inputs(t)
            inputs += [source, *sampling]

        def body(graph: ops.Graph) -> ops.Expr:
            ids = graph.next_token_ids(token_ids, source, sampling[-1]) if self.device_sampling else token_ids
            integers = [self._rope_table(graph), positions, slots, page_table, lengths]
            logits = decoder(graph, StepInputs(ids, pages, integers, DECODE_ATTENTION, None))
            return relax.Tuple([logits, graph.sample(logits, *sampling)]) if self.device_sampling else logits

        self._function("decode", [*inputs, pages], {"t": self.limits.max_batch}, decoder, body)

    def _sample(self) -> None:
        t = tvm.tirx.Var("t", "int64")
        masks, words = tvm.tirx.Var("m", "int64"), -(-self.config.vocab_size // 32)
        logits = _tensor("logits", "float32", t, self.config.vocab_size)
        sampling = [*self._sampling_inputs(t), _tensor("allowed", "int32", masks, words)]
        self._function("sample", [logits, *sampling], {"t": self.limits.max_batch}, Decoder(self.config, self.dtype),
                       lambda graph: graph.sample(logits, *sampling), {READS_RESULTS: True})

    def _top_logprobs(self) -> None:
        t = tvm.tirx.Var("t", "int64")
        inputs = [_tensor("logits", "float32", t, self.config.vocab_size), _tensor("counters", "int32", t, 8)]
        self._function("top_logprobs", inputs, {"t": self.limits.max_batch}, Decoder(self.config, self.dtype),
                       lambda graph: graph.top_logprobs(*inputs), {READS_RESULTS: True})

    def _sampling_inputs(self, t: object) -> list[relax.Var]:
        counts_rows = tvm.tirx.Var("c", "int64")
        return [_tensor("settings", "float32", t, 8), _tensor("counters", "int32", t, 8),
                _tensor("counts", "int32", counts_rows, counts_width(self.config.vocab_size)),
                _tensor("drawn", "int32", self.limits.max_batch, 2)]

    def _rope_table(self, graph: ops.Graph) -> ops.Expr:
        frequencies, factor = inv_freq(self.config.rope, self.limits.max_context)
        return ops.rope_table(graph, frequencies, self.limits.max_context, factor)

    def _function(self, name: str, inputs: list[relax.Var], bounds: dict[str, int], decoder: Decoder,
                  body: Callable[[ops.Graph], ops.Expr], more: Mapping[str, object] = MappingProxyType({})) -> None:
        attrs = {"num_input": len(inputs), "tir_var_upper_bound": bounds, **more}
        with self.builder.function(name, attrs=attrs):
            with self.builder.dataflow():
                out = self.builder.emit_output(body(ops.Graph(self.builder)))
            self.builder.emit_func_output(out, [*inputs, *decoder.parameters.values()])
