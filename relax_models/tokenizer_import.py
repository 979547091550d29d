"""Tokenizer files and chat templates of a Hugging Face folder.

tokenizer.json decides how text becomes ids; tokenizer_config.json adds special tokens and templates. Rendering
templates and encoding text is the runtime's job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from relaxpack.errors import TokenizerError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.contents import TokenizerAssets
from relaxpack.relax_models.end_tokens import end_token_ids
from relaxpack.relax_models.json_files import read_object, read_text

CONFIG = "tokenizer_config.json"
_COPIED = ("tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", "generation_config.json",
           "chat_template.jinja")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_IGNORED = {
    "tokenizer.json decides": (
        "tokenizer_class", "model_type", "add_prefix_space", "legacy", "use_fast", "from_slow", "sp_model_kwargs",
        "split_special_tokens", "errors", "trim_offsets", "fast_tokenizer", "vocab_size", "special_tokens_map_file",
        "tokenizer_file", "vocab_file", "merges_file", "byte_fallback", "is_local", "backend", "local_files_only",
        "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens", "pretokenizer"),
    "decoding gives the exact text": ("clean_up_tokenization_spaces", "spaces_between_special_tokens",
                                      "use_default_system_prompt"),
    "prompts are neither padded nor cut": (
        "padding_side", "truncation_side", "max_length", "padding", "truncation", "stride", "pad_to_multiple_of",
        "pad_token_type_id", "truncation_strategy", "model_input_names", "return_token_type_ids"),
    "the context length is the model config's": ("model_max_length",),
    "describes the file": ("name_or_path", "_name_or_path", "processor_class", "auto_map", "transformers_version",
                           "_commit_hash", "unsloth_version", "device_map", "do_lower_case", "token", "revision",
                           "chat_template_format", "response_schema", "tool_parser_type"),
}
# Tokenizer classes that rebuild their BOS rule from add_bos_token instead of keeping tokenizer.json's.
_CLASSES_WITH_BOS_FLAG = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast",
                          "GemmaTokenizer", "GemmaTokenizerFast")


def read_tokenizer(folder: Path, reader: KeyReader, stated_ends: list[int], bos_id: int | None,
                   vocab_size: int) -> TokenizerAssets:
    """`reader` holds tokenizer_config.json (may be empty); `stated_ends` and `bos_id` come from the other configs;
    `vocab_size` is the number of embedding rows."""
    tokenizer = load_tokenizer(folder)
    beyond = sorted(text for text, token_id in tokenizer.get_vocab().items() if token_id >= vocab_size)
    if beyond:
        reader.audit.warn(f"tokenizer.json has {len(beyond)} tokens beyond the {vocab_size} embedding rows, such as "
                          f"{beyond[0]!r}; text that holds them cannot be run")
    templates = _templates(folder, reader)
    special = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
               if token.special}
    strings = _special_strings(folder, reader)
    _check_added_tokens(reader, tokenizer)
    if "bos_token" in strings:
        bos_id = _id_of(tokenizer, strings["bos_token"], "bos_token")
    eos_id = _id_of(tokenizer, strings["eos_token"], "eos_token") if "eos_token" in strings else None
    add_bos = _add_bos(reader, tokenizer, bos_id)
    for why, keys in _IGNORED.items():
        for key in keys:
            reader.ignore(key, why)
    reader.finish()
    files = {name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()}
    ends = end_token_ids([*stated_ends, eos_id], special, templates.values())
    if not ends:
        reader.audit.warn("the checkpoint names no end token: replies end only at the token limit")
    return TokenizerAssets(files, templates.get("default"), templates, bos_id, ends, add_bos, strings)


def load_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json of a checkpoint. Raises TokenizerError where it is missing or broken."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / name).is_file()]
        if others:
            raise TokenizerError(f"{folder.name} has no tokenizer.json, only {', '.join(others)}; write one with "
                                 "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
        raise TokenizerError(f"{folder.name} has no tokenizer.json: the tokenizer is missing; incomplete download?")
    text = read_text(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(f"tokenizer.json cannot be read: {error}; incomplete download?") from None


def _special_strings(folder: Path, reader: KeyReader) -> dict[str, str]:
    """tokenizer_config.json, completed by the older special_tokens_map.json where it names no token."""
    # Multimodal and tool-calling tokenizers name more of them, such as "image_token"; templates may use those.
    extra = [key for key, value in reader.data.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    older = KeyReader("special_tokens_map.json", read_object(folder / "special_tokens_map.json", required=False),
                      reader.audit)
    strings = {}
    for name in dict.fromkeys([*_NAMED_TOKENS, *extra]):
        text = _token_text(reader, name)
        if text is None and name not in reader.data:  # null there means "none"
            text = _token_text(older, name)
        if text is not None:
            strings[name] = text
    return strings


def _token_text(reader: KeyReader, name: str) -> str | None:
    """A special token is a string or {"content": ...}."""
    value = reader.take(name, None, (str, dict))
    if isinstance(value, dict):
        value = value.get("content")
        if not isinstance(value, str):
            raise TokenizerError(f"{reader.file}: {name} = {shorten(reader.data[name])} has no content")
    return value


def _id_of(tokenizer: Tokenizer, text: str, name: str) -> int:
    token_id = tokenizer.token_to_id(text)
    if token_id is None:
        raise TokenizerError(f"{CONFIG}: {name} = {text!r} is not in tokenizer.json")
    return token_id


def _check_added_tokens(reader: KeyReader, tokenizer: Tokenizer) -> None:
    """added_tokens_decoder repeats tokenizer.json; a contradiction means that files of two models are mixed."""
    for key, value in reader.take("added_tokens_decoder", {}, dict).items():
        text = value.get("content") if isinstance(value, dict) else None
        if text is not None and tokenizer.token_to_id(text) != int(key):
            raise TokenizerError(f"{reader.file}: added_tokens_decoder gives {text!r} the id {key}, tokenizer.json "
                                 f"{tokenizer.token_to_id(text)}; files of different models are mixed")


def _add_bos(reader: KeyReader, tokenizer: Tokenizer, bos_id: int | None) -> bool:
    """Whether raw text starts with BOS: what tokenizer.json's post-processor does, unless the class has a flag."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    by_file = bos_id is not None and ids[:1] == [bos_id] and plain[:1] != [bos_id]
    flag = reader.take("add_bos_token", None, bool)
    if reader.flag("add_eos_token"):
        reader.audit.warn(f"{reader.file}: add_eos_token is true; prompts are not ended with EOS here")
    if flag is None or flag == by_file:
        return by_file
    if flag and bos_id is None:
        raise TokenizerError(f"{reader.file}: add_bos_token is true but no bos_token is given; name the token or set "
                             "the flag to false")
    wins = reader.data.get("tokenizer_class") in _CLASSES_WITH_BOS_FLAG
    reader.audit.warn(f"{reader.file}: add_bos_token = {flag} contradicts tokenizer.json; "
                      f"{'the flag' if wins else 'tokenizer.json'} wins, as in transformers")
    return flag if wins else by_file


def _templates(folder: Path, reader: KeyReader) -> dict[str, str]:
    """Templates by name. chat_template.jinja wins over the key, as in transformers."""
    value: Any = reader.take("chat_template", None, (str, list))
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif value is not None:
        for row in value:
            if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not isinstance(
                    row.get("template"), str):
                raise TokenizerError(f"{reader.file}: a named chat template must have name and template, got "
                                     f"{shorten(row)}")
            templates[row["name"]] = row["template"]
    file = folder / "chat_template.jinja"
    if file.is_file():
        text = read_text(file)
        if templates and templates.get("default") != text:
            reader.audit.warn(f"{file.name} and the chat_template of {reader.file} differ; the file wins")
        templates = {"default": text}  # the file replaces the whole key
    for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[extra.stem] = read_text(extra)
    return templates
