"""The keys of `quantization_config` in the schemes with 4-bit weights in groups along the input features: quant_method "awq"
and "gptq", and "compressed-tensors" where its format is pack-quantized.

Which layers are quantised, their zeros and the order of their columns are read from the tensors, in `int4_tensors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.fp8_import import compressed_groups

WHOLE_COLUMN = -1       # as both schemes write a group of all input features
_BY_TENSOR = "which weights are quantised is read from the tensors"
_HOW_MADE = "how the weights were quantised"
_HOW_RUN = "how another program runs them"
_MADE = ("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "dataset", "tokenizer",
         "batch_size", "block_name_to_quantize", "cache_block_outputs", "modules_in_block_to_quantize",
         "module_name_preceding_first_block", "model_seqlen", "pad_token_id", "model_name_or_path", "model_file_base_name",
         "cache_examples_on_gpu", "quantizer", "act_group_aware", "hyb_act", "meta", "offload_to_disk", "gptaq",
         "gptaq_alpha", "failsafe")
_RUN = ("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "backend", "do_fuse",
        "fuse_max_seq_len", "modules_to_fuse")


@dataclass(frozen=True)
class Int4Scheme:
    """`group`: input features that share a scale, WHOLE_COLUMN for all of them. `zero_offset`: how much larger a zero is
    than its stored form."""

    method: str  # "awq" | "gptq" | "compressed"
    group: int
    zero_offset: int = 0


def awq(keys: KeyReader) -> Int4Scheme:
    keys.require("version", ("gemm", "GEMM"), "the order in which codes are packed")
    keys.require("zero_point", (True,), "AWQ stores zeros")
    keys.require("backend", ("autoawq",), "whose order of packing")
    keys.ignore("modules_to_not_convert", _BY_TENSOR)
    return _scheme(keys, "awq")


def gptq(keys: KeyReader) -> Int4Scheme:
    """The first form of the format stores zeros less one, "gptq_v2" as they are."""
    forms = ("gptq", "gptq_v2")
    for key in ("checkpoint_format", "format"):
        keys.require(key, forms, "how the tensors are packed")
    form = keys.take("checkpoint_format", None) or keys.take("format", "gptq")
    keys.require("is_marlin_format", (False,), "the order in which codes are packed")
    keys.require("pack_dtype", ("int32",), "the order in which codes are packed")
    keys.ignore("sym", "zeros are read from the tensors")
    keys.ignore("desc_act", "the order of columns is read from the tensors")
    keys.ignore("lm_head", _BY_TENSOR)
    for module, settings in keys.take("dynamic", {}, dict).items():
        if not module.startswith("-:"):         # those name layers that are not quantised
            raise ConfigError(f"{keys.file}: {keys.prefix}dynamic gives {module!r} settings of its own "
                              f"({shorten(settings)}), which is not supported: all quantised layers must be alike")
    return _scheme(keys, "gptq", 0 if form == "gptq_v2" else 1)


def pack_quantized(keys: KeyReader) -> Int4Scheme:
    """Of compressed-tensors: all groups must be alike."""
    keys.require("format", ("pack-quantized",), "4-bit weights")
    sizes = {_packed_group(group, weights) for group, weights in compressed_groups(keys)}
    if len(sizes) != 1:
        raise ConfigError(f"{keys.file}: {keys.prefix}config_groups have {sorted(sizes) if sizes else 'no'} group sizes; "
                          "expected one")
    return Int4Scheme("compressed", sizes.pop())


def _packed_group(group: KeyReader, weights: KeyReader) -> int:
    """Its group size."""
    group.require("format", ("pack-quantized",), "the format of the whole is pack-quantized")
    group.ignore("input_activations", "only the weights are taken: activations are not quantised")
    group.finish()
    weights.take("num_bits")
    weights.require("num_bits", (4,), "of pack-quantized weights, those of 4 bits are read")
    weights.require("type", ("int",), "4-bit codes are integers")
    weights.require("strategy", ("group", "channel"), "how far a scale reaches")
    weights.ignore("symmetric", "zeros are read from the tensors")
    weights.ignore("actorder", "the order of columns is read from the tensors")
    weights.require("block_structure", ((),), "scales of groups")
    size = _group_size(weights) if weights.data.get("strategy") == "group" else WHOLE_COLUMN
    weights.ignore("group_size", "a scale reaches over all input features")
    weights.finish()
    return size


def _group_size(keys: KeyReader) -> int:
    group = keys.integer("group_size")
    if group not in (WHOLE_COLUMN, 32, 64) and (group < 1 or group % 128):
        raise ConfigError(f"{keys.file}: {keys.prefix}group_size = {group} is not supported; supported: 32, 64, multiples "
                          f"of 128, and {WHOLE_COLUMN} (all input features)")
    return int(group)


def _scheme(keys: KeyReader, method: str, zero_offset: int = 0) -> Int4Scheme:
    keys.take("bits")
    keys.require("bits", (4,), f"of {method}, 4-bit weights are read")
    group = _group_size(keys)
    for key in _MADE:
        keys.ignore(key, _HOW_MADE)
    for key in _RUN:
        keys.ignore(key, _HOW_RUN)
    return Int4Scheme(method, group, zero_offset)
