"""Builds tokenizer.json and the other tokenizer assets from GGUF metadata.

Two kinds of vocabulary: "gpt2" (byte-level BPE with stored merges) and "llama" (SentencePiece BPE, whose merges follow
from the scores). Splitting rules are those of the tokenizers the GGUF names in `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from relaxpack.errors import TokenizerError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.contents import TokenizerAssets
from relaxpack.relax_models.end_tokens import end_token_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of the GGUF specification

_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
           r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# `tokenizer.ggml.pre` -> our rule.
PRETOKENIZERS = {
    "gpt-2": "gpt2", "phi-2": "gpt2", "gpt2": "gpt2",
    "smollm": "digits", "starcoder": "digits", "refact": "digits",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3", "falcon3": "llama3",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
}
_REGEX = {"llama3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_BOS_BY_DEFAULT = ("llama3", "tekken")  # where tokenizer.ggml.add_bos_token is absent

_P = "tokenizer.ggml."
_IGNORED = ("padding_token_id", "seperator_token_id", "separator_token_id", "cls_token_id", "mask_token_id",
            "prefix_token_id", "suffix_token_id", "middle_token_id", "fim_pre_token_id", "fim_suf_token_id",
            "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "token_type_count",
            "add_sep_token", "remove_extra_whitespaces")


def read_gguf_tokenizer(metadata: KeyReader, vocab_size: int, pretokenizer: str | None) -> TokenizerAssets:
    """`pretokenizer` overrides `tokenizer.ggml.pre` (one of `PRETOKENIZERS`)."""
    model = metadata.take(_P + "model", None, str)
    if model is None:
        raise TokenizerError(f"{metadata.file} holds no tokenizer (tokenizer.ggml.model is missing)")
    tokens = metadata.take(_P + "tokens", kind=list)
    types = metadata.take(_P + "token_type", [NORMAL] * len(tokens), list)
    if len(types) != len(tokens) or len(tokens) > vocab_size:
        raise TokenizerError(f"{metadata.file}: {len(tokens)} tokens, {len(types)} token types and {vocab_size} "
                             "embedding rows do not match; the file is damaged")
    try:
        "".join(tokens).encode()
    except (TypeError, UnicodeEncodeError):
        raise TokenizerError(f"{metadata.file}: the vocabulary holds what is not UTF-8 text; the file is "
                             "damaged") from None
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{metadata.file}: the vocabulary holds a token twice; the file is damaged")
    bos, eos, eot, eom, unknown = (_token_id(metadata, name, len(tokens)) for name in
                                   ("bos", "eos", "eot", "eom", "unknown"))
    if metadata.data.get(_P + "precompiled_charsmap"):
        raise TokenizerError(f"{metadata.file}: tokenizer.ggml.precompiled_charsmap is not supported")
    metadata.take(_P + "precompiled_charsmap", None)
    if model == "gpt2":
        rule = _rule(metadata, tokens, pretokenizer)
        tokenizer = _byte_level(metadata, tokens, types, rule)
        default_bos = rule in _BOS_BY_DEFAULT
        metadata.ignore(_P + "scores", "byte-level BPE has none")
        metadata.require(_P + "add_space_prefix", (False,), "byte-level BPE with a space prefix")
    elif model == "llama":
        tokenizer, default_bos = _sentencepiece(metadata, tokens, types, unknown), True
        metadata.ignore(_P + "pre", "SentencePiece splits nothing beforehand")
        metadata.ignore(_P + "merges", "merges follow from the scores")
    else:
        raise TokenizerError(f"{metadata.file}: tokenizer.ggml.model = {model!r} is not supported; supported: gpt2, "
                             "llama")
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in zip(tokens, types, strict=True)
                          if kind == USER_DEFINED])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                  for i, (t, kind) in enumerate(zip(tokens, types, strict=True))
                                  if kind in (CONTROL, UNKNOWN) or i in (bos, eos, eot, eom)])
    _check_ids(metadata, tokenizer, tokens, types)
    add_bos = metadata.take(_P + "add_bos_token", default_bos and bos is not None, bool)
    if add_bos and bos is None:
        raise TokenizerError(f"{metadata.file}: tokenizer.ggml.add_bos_token is true but tokenizer.ggml.bos_token_id "
                             "is missing; set one of them with gguf-set-metadata")
    if metadata.flag(_P + "add_eos_token"):
        metadata.audit.warn(f"{metadata.file}: add_eos_token is true; prompts are not ended with EOS here")
    if add_bos and bos is not None:
        tokenizer.post_processor = _with_bos(tokenizer.post_processor, tokens[bos], bos)
    templates = _templates(metadata)
    special = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (CONTROL, USER_DEFINED)}
    ends = end_token_ids([eos, eot, eom], special, templates.values())
    if not ends:
        metadata.audit.warn(f"{metadata.file} names no end token: replies end only at the token limit")
    if not templates:
        metadata.audit.warn(f"{metadata.file} has no chat template: completions work, chat does not")
    for name in _IGNORED:
        metadata.ignore(_P + name, "not used when generating text")
    metadata.ignore("tokenizer.huggingface.json", "rebuilt from the vocabulary")
    strings = {f"{name}_token": tokens[i] for name, i in (("bos", bos), ("eos", eos), ("unk", unknown))
               if i is not None}
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    return TokenizerAssets(files, templates.get("default"), templates, bos, ends, bool(add_bos), strings)


def _token_id(metadata: KeyReader, name: str, count: int) -> int | None:
    value = metadata.integer(f"{_P}{name}_token_id", None)
    if value is None or value in (0xFFFFFFFF, -1):  # how writers say "none"
        return None
    if not 0 <= value < count:
        raise TokenizerError(f"{metadata.file}: {_P}{name}_token_id = {value} is outside the vocabulary of {count}")
    return value


def _rule(metadata: KeyReader, tokens: list[str], override: str | None) -> str:
    """How text is split before merging. A wrong rule gives wrong ids silently, so a guess is always reported."""
    stated = metadata.take(_P + "pre", None, str)
    known = ", ".join(sorted(PRETOKENIZERS))
    if override is not None:
        if override not in PRETOKENIZERS:
            raise TokenizerError(f"unknown pretokenizer {override!r}; known: {known}")
        return PRETOKENIZERS[override]
    if stated is None or stated == "default":
        guess = _guess(tokens)
        metadata.audit.warn(f"{metadata.file} does not say how its tokenizer splits text (tokenizer.ggml.pre); "
                            f"guessing {guess!r}. Override with --pretokenizer NAME, one of: {known}")
        return PRETOKENIZERS[guess]
    if stated not in PRETOKENIZERS:
        raise TokenizerError(f"{metadata.file}: tokenizer.ggml.pre = {stated!r} is not supported; known: {known}. "
                             "Override with --pretokenizer NAME if one of them fits")
    return PRETOKENIZERS[stated]


def _guess(tokens: list[str]) -> str:
    """By tokens that only one published vocabulary has."""
    have = set(tokens)
    if "<|begin_of_text|>" in have:
        return "llama-bpe"
    if "<jupyter_start>" in have or "<fim_prefix>" in have:
        return "smollm"
    if "<|endoftext|>" in have and "<|im_start|>" in have and len(tokens) > 150000:
        return "qwen2"
    return "gpt-2"


def _byte_level(metadata: KeyReader, tokens: list[str], types: list[int], rule: str) -> Tokenizer:
    merges = metadata.take(_P + "merges", kind=list)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    bad = next((m for m, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if bad is not None:
        raise TokenizerError(f"{metadata.file}: the merge {shorten(bad)} is not a pair; the file is damaged")
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 and Tekken take a piece that is itself a token whole, without merging.
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule in ("llama3", "tekken"))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(f"{metadata.file}: the merges do not fit the vocabulary: {error}") from None
    tokenizer = Tokenizer(model)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if rule in _REGEX:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_REGEX[rule]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif rule == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: KeyReader, tokens: list[str], types: list[int], unknown: int | None) -> Tokenizer:
    scores = metadata.take(_P + "scores", kind=list)
    if len(scores) != len(tokens):
        raise TokenizerError(f"{metadata.file}: {len(scores)} scores for {len(tokens)} tokens; the file is damaged")
    vocab = {token: i for i, token in enumerate(tokens)}
    fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    model = models.BPE(vocab=vocab, merges=_merges_from_scores(tokens, types, scores), fuse_unk=True,
                       byte_fallback=fallback, unk_token=None if unknown is None else tokens[unknown])
    tokenizer = Tokenizer(model)
    space_prefix = metadata.flag(_P + "add_space_prefix", True)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if space_prefix else []) + spaces)
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins, at each step, the leftmost pair whose joined piece scores best. The same as BPE with one
    merge for every way to split a piece in two, ordered by the piece's score."""
    score = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    merges = [(-value, piece[:cut], piece[cut:]) for piece, value in score.items() for cut in range(1, len(piece))
              if piece[:cut] in score and piece[cut:] in score]
    merges.sort()
    return [(left, right) for _, left, right in merges]


def _with_bos(other: Any, text: str, token_id: int) -> Any:
    template = processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A $B", special_tokens=[(text, token_id)])
    return template if other is None else processors.Sequence([other, template])


def _check_ids(metadata: KeyReader, tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Adding tokens must not have moved any: an id that means another text would be silent nonsense."""
    for i, token in enumerate(tokens):
        if types[i] in (CONTROL, USER_DEFINED, UNKNOWN) and tokenizer.token_to_id(token) != i:
            raise TokenizerError(f"{metadata.file}: token {i} ({token!r}) cannot keep its id; the vocabulary is "
                                 "damaged")


def _templates(metadata: KeyReader) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    metadata.take("tokenizer.chat_templates", None, list)  # the names; the texts stand under their own keys
    for key in list(metadata.data):
        if key == prefix or key.startswith(prefix + "."):
            templates["default" if key == prefix else key[len(prefix) + 1:]] = metadata.take(key, kind=str)
    return templates
