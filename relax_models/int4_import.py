"""The keys of `quantization_config` in the schemes with 4-bit weights in groups along the input features: quant_method "awq"
and "gptq", and "compressed-tensors" where its format is pack-quantized.

Which layers are quantised, their zeros and the order of their columns are read from the tensors, in `int4_tensors.py`, which
compares them with what the keys say of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.fp8_import import compressed_groups

WHOLE_COLUMN = -1       # as both schemes write a group of all input features
FORM_KEYS = ("checkpoint_format", "format")
FIRST_FORM, SECOND_FORM = "gptq", "gptq_v2"
ZEROS_DIFFER = f"{FIRST_FORM} stores zeros less one and {SECOND_FORM} as they are, so every weight would be off by a scale"
_BY_TENSOR = "which weights are quantised is read from the tensors"
_ORDER = "the order in which codes are packed"
_HOW_MADE = "how the weights were quantised"
_HOW_RUN = "how another program runs them"
_MADE = ("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "dataset", "tokenizer",
         "batch_size", "block_name_to_quantize", "cache_block_outputs", "modules_in_block_to_quantize",
         "module_name_preceding_first_block", "model_seqlen", "pad_token_id", "model_name_or_path", "model_file_base_name",
         "cache_examples_on_gpu", "quantizer", "act_group_aware", "hyb_act", "meta", "offload_to_disk", "gptaq",
         "gptaq_alpha", "failsafe",
         # of AutoRound
         "amp", "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
         "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "provider",
         "quant_block_list", "scale_dtype", "seqlen", "supported_types", "to_quant_block_names", "act_data_type",
         "act_dynamic", "act_group_size", "act_sym")
_RUN = ("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "backend", "do_fuse",
        "fuse_max_seq_len", "modules_to_fuse")


@dataclass(frozen=True)
class Int4Scheme:
    """`group`: input features that share a scale, WHOLE_COLUMN for all of them. `zero_offset`: how much larger a zero is
    than its stored form. What the keys say of the tensors: `symmetric`, that all zeros are 8 (None: nothing); `reordered`,
    that the order of the columns is stored, as a g_idx."""

    method: str  # "awq" | "gptq" | "compressed"
    group: int
    zero_offset: int = 0
    symmetric: bool | None = None
    reordered: bool = False


def awq(keys: KeyReader) -> Int4Scheme:
    for key in ("version", *FORM_KEYS):
        keys.require(key, ("gemm", "GEMM"), _ORDER)
    keys.require("zero_point", (True,), "AWQ stores zeros")
    keys.ignore("sym", "zeros are read from the tensors")
    keys.ignore("desc_act", "AWQ reorders no columns")
    keys.require("backend", ("autoawq",), "whose order of packing")
    keys.ignore("modules_to_not_convert", _BY_TENSOR)
    return _scheme(keys, "awq")


def gptq(keys: KeyReader) -> Int4Scheme:
    """The first form of the format stores zeros less one, "gptq_v2" as they are."""
    forms = set()
    for key in FORM_KEYS:
        keys.require(key, (FIRST_FORM, SECOND_FORM), "how the tensors are packed")
        forms.add(keys.take(key, None))
    forms = forms - {None} or {FIRST_FORM}
    if len(forms) > 1:
        raise ConfigError(f"{keys.file}: {' and '.join(f'{keys.prefix}{key} = {keys.data[key]!r}' for key in FORM_KEYS)} "
                          f"contradict each other: {ZEROS_DIFFER}; keep the key of the program that wrote the tensors")
    (form,) = forms
    keys.require("is_marlin_format", (False,), _ORDER)
    symmetric, reordered = keys.take("sym", None, bool), keys.flag("desc_act")
    return replace(_scheme(keys, "gptq"), zero_offset=0 if form == SECOND_FORM else 1, symmetric=symmetric or None,
                   reordered=reordered)


def pack_quantized(keys: KeyReader) -> Int4Scheme:
    """Of compressed-tensors: all groups must be alike."""
    keys.require("format", ("pack-quantized",), "4-bit weights")
    schemes = {_packed_group(group, weights) for group, weights in compressed_groups(keys)}
    sizes = {scheme.group for scheme in schemes}
    if len(sizes) != 1:
        raise ConfigError(f"{keys.file}: {keys.prefix}config_groups have {sorted(sizes) if sizes else 'no'} group sizes; "
                          "expected one")
    if len(schemes) != 1:
        raise ConfigError(f"{keys.file}: {keys.prefix}config_groups differ in symmetric or actorder, which is not "
                          "supported: all quantised layers must be alike")
    return schemes.pop()


def _packed_group(group: KeyReader, weights: KeyReader) -> Int4Scheme:
    group.require("format", ("pack-quantized",), "the format of the whole is pack-quantized")
    group.ignore("input_activations", "only the weights are taken: activations are not quantised")
    group.finish()
    weights.take("num_bits")
    weights.require("num_bits", (4,), "of pack-quantized weights, those of 4 bits are read")
    weights.require("type", ("int",), "4-bit codes are integers")
    weights.require("strategy", ("group", "channel"), "how far a scale reaches")
    symmetric, reordered = weights.flag("symmetric", True), weights.take("actorder", None) in ("group", "dynamic", True)
    weights.require("block_structure", ((),), "scales of groups")
    strategy = weights.data.get("strategy") or ("group" if "group_size" in weights else "channel")
    size = _group_size(weights) if strategy == "group" else WHOLE_COLUMN
    weights.ignore("group_size", "a scale reaches over all input features")
    weights.finish()
    return Int4Scheme("compressed", size, symmetric=symmetric, reordered=reordered)


def _group_size(keys: KeyReader) -> int:
    group = keys.integer("group_size")
    if group not in (WHOLE_COLUMN, 32, 64) and (group < 1 or group % 128):
        raise ConfigError(f"{keys.file}: {keys.prefix}group_size = {group} is not supported; supported: 32, 64, multiples "
                          f"of 128, and {WHOLE_COLUMN} (all input features)")
    return int(group)


def _scheme(keys: KeyReader, method: str) -> Int4Scheme:
    keys.take("bits")
    keys.require("bits", (4,), f"of {method}, 4-bit weights are read")
    keys.require("data_type", ("int",), "4-bit codes are integers")
    keys.require("act_bits", (16, 32), "activations are not quantised")
    keys.require("pack_dtype", ("int32",), _ORDER)
    keys.ignore("lm_head", _BY_TENSOR)
    for module, settings in keys.take("dynamic", {}, dict).items():
        if not module.startswith("-:"):         # those name layers that are not quantised
            raise ConfigError(f"{keys.file}: {keys.prefix}dynamic gives {module!r} settings of its own "
                              f"({shorten(settings)}), which is not supported: all quantised layers must be alike")
    group = _group_size(keys)
    for key in _MADE:
        keys.ignore(key, _HOW_MADE)
    for key in _RUN:
        keys.ignore(key, _HOW_RUN)
    return Int4Scheme(method, group)
