"""The decoder-only transformer of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2, Gemma), described by its config.

Math: pre-norm blocks, x += Wo·attention(RoPE(Wq h), RoPE(Wk h), Wv h) with h = rms_norm(x), then
x += Wd·(f(Wg h) * Wu h), f silu or GELU.
Parameters carry the names of the Hugging Face checkpoints. This file knows no kernel, no weight format, no target.
"""

from __future__ import annotations

from dataclasses import dataclass

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.ops import Expr, Graph
from tvm import relax


@dataclass(frozen=True)
class StepInputs:
    """What a step gives to every layer. `attention_name` selects the placeholder; `integers` are its operands after
    qkv and pages, in its order."""

    token_ids: Expr          # i32[t]
    pages: Expr
    integers: list[Expr]
    attention_name: str
    rows: Expr | None        # i32[r]: those that have a result; None: every row


class Decoder:
    """Builds the graph of one step. `parameters` maps a checkpoint name to its Relax variable and is filled on
    demand by `parameter(name, shape)`."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.config, self.dtype = config, dtype
        self.parameters: dict[str, relax.Var] = {}

    def parameter(self, name: str, *shape: int) -> relax.Var:
        if name not in self.parameters:
            self.parameters[name] = relax.Var(name, relax.TensorType(list(shape), self.dtype))
        return self.parameters[name]

    def linear(self, graph: Graph, x: Expr, prefix: str, out: int, inner: int, bias: bool) -> Expr:
        weight = self.parameter(f"{prefix}.weight", out, inner)
        return graph.linear(x, weight, self.parameter(f"{prefix}.bias", out) if bias else None)

    def norm(self, graph: Graph, x: Expr, name: str) -> Expr:
        return graph.rms_norm(x, self.parameter(name, self.config.hidden_size), self.config.norm_epsilon)

    def attention_block(self, graph: Graph, h: Expr, step: StepInputs, layer: int) -> Expr:
        """h[t, H] → [t, H], without norm and residual sum; writes this step's keys and values into the pages."""
        c = self.config
        prefix = f"model.layers.{layer}.self_attn"
        q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = graph.concat([
            self.linear(graph, h, f"{prefix}.{part}_proj", width, c.hidden_size, c.qkv_bias)
            for part, width in (("q", q_width), ("k", kv_width), ("v", kv_width))])
        norms = [self.parameter(f"{prefix}.{part}_norm.weight", c.head_dim) for part in "qk"] if c.qk_norm else []
        o = graph.attention(step.attention_name, [qkv, step.pages, *step.integers, *norms],
                            layer, c.layer_windows[layer], q_width)
        return self.linear(graph, o, f"{prefix}.o_proj", c.hidden_size, q_width, c.output_bias)

    def mlp_block(self, graph: Graph, h: Expr, layer: int) -> Expr:
        """h[t, H] → [t, H], without norm and residual sum."""
        c = self.config
        prefix = f"model.layers.{layer}.mlp"
        gate, up = (self.linear(graph, h, f"{prefix}.{part}_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
                    for part in ("gate", "up"))
        return self.linear(graph, graph.glu(c.activation, gate, up), f"{prefix}.down_proj", c.hidden_size,
                           c.intermediate_size, c.mlp_bias)

    @property
    def _table(self) -> relax.Var:
        return self.parameter("model.embed_tokens.weight", self.config.vocab_size, self.config.hidden_size)

    def _final(self, graph: Graph, step: StepInputs) -> Expr:
        """Rows after the final norm, [r, H] in the dtype of activations."""
        c = self.config
        x = graph.take_rows(self._table, step.token_ids)
        if c.embedding_scale != 1.0:    # rounded to the dtype of activations, as transformers does
            x = graph.scale(x, c.embedding_scale)
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}"
            h = self.norm(graph, x, f"{prefix}.input_layernorm.weight")
            x = graph.add(self.attention_block(graph, h, step, layer), x)
            h = self.norm(graph, x, f"{prefix}.post_attention_layernorm.weight")
            x = graph.add(self.mlp_block(graph, h, layer), x)
        if step.rows is not None:
            x = graph.take_rows(x, step.rows)
        return self.norm(graph, x, "model.norm.weight")

    def _float32(self, graph: Graph, x: Expr) -> Expr:
        return x if self.dtype == "float32" else graph(relax.op.astype(x, "float32"))

    def __call__(self, graph: Graph, step: StepInputs) -> Expr:
        """Logits f32[r, V]."""
        c = self.config
        x = self._final(graph, step)
        head = self._table if c.tie_embeddings else self.parameter("lm_head.weight", c.vocab_size, c.hidden_size)
        return self._float32(graph, graph.linear(x, head))

    def hidden_states(self, graph: Graph, step: StepInputs) -> Expr:
        """Last hidden states f32[r, H], after the final norm; no head."""
        return self._float32(graph, self._final(graph, step))
