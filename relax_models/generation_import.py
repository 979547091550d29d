"""generation_config.json: sampling defaults and end tokens; the rest is ignored by name.

What a checkpoint advises that we do not do is reported as a warning when it would change the text.
"""

from __future__ import annotations

from typing import Any

from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.contents import GenerationDefaults

_IGNORED = (
    "transformers_version", "_from_model_config", "pad_token_id", "use_cache", "cache_implementation", "cache_config",
    "return_legacy_cache", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "max_length", "max_new_tokens", "max_time", "trust_remote_code", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "generation_kwargs", "transformers.js_config", "disable_compile", "low_memory",
    "num_return_sequences", "chat_format", "max_window_size", "prefill_chunk_size", "compile_config", "_commit_hash")
# Ignored where the value does nothing; a warning otherwise.
_INERT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0, 0.0), "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,), "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,),
    "early_stopping": (False,), "renormalize_logits": (False,), "remove_invalid_values": (False,),
    "guidance_scale": (1, 1.0), "top_h": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "bad_words_ids": ([],), "force_words_ids": ([],),
    "constraints": ([],), "sequence_bias": (), "exponential_decay_length_penalty": (), "watermarking_config": (),
    "token_healing": (False,), "stop_strings": ([],), "dola_layers": (), "decoder_start_token_id": (),
    "forced_decoder_ids": ([],)}


def token_ids(reader: KeyReader, key: str) -> list[int]:
    """An id, a list of ids, or nothing."""
    value = reader.take(key, [], (int, list))
    return list(value) if isinstance(value, list) else [value]


def read_generation_config(reader: KeyReader) -> tuple[GenerationDefaults, list[int]]:
    """The defaults and the stated end-of-text ids. An absent file is an empty reader."""
    defaults = GenerationDefaults(
        do_sample=reader.take("do_sample", None, bool), temperature=reader.number("temperature", None),
        top_p=reader.number("top_p", None), top_k=reader.integer("top_k", None), min_p=reader.number("min_p", None),
        repetition_penalty=reader.number("repetition_penalty", None))
    ends = token_ids(reader, "eos_token_id")
    reader.ignore("bos_token_id", "BOS is read from the tokenizer")
    for key in _IGNORED:
        reader.ignore(key, "does not change what is generated here")
    for key, inert in _INERT.items():
        if key in reader and reader.data[key] not in inert:
            reader.audit.warn(f"{reader.file}: {key} = {shorten(reader.data[key])} is not applied")
        reader.ignore(key, "not applied")
    reader.finish()
    return defaults, ends
