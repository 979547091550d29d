"""Which token ids end a reply: the stated ones, joined with the end-of-turn markers that a vocabulary is known to use.

A checkpoint often states only `</s>` while its chat template ends turns with another token; generation would then
never stop. Only tokens the tokenizer holds as special count, so ordinary text never ends a reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Texts that published chat models end a turn or a text with.
END_MARKERS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|eot|>", "<end_of_turn>",
    "<|end_of_turn|>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|endofturn|>", "<EOT>", "</s>"})
# "</s>" and the like may be in a vocabulary for other reasons; these end a turn only where a template writes them.
_ONLY_IN_TEMPLATE = frozenset({"</s>", "<|end|>", "<|call|>", "<|return|>", "<EOT>"})


def end_token_ids(stated: Iterable[int | None], special_tokens: Mapping[str, int],
                  templates: Iterable[str]) -> tuple[int, ...]:
    """Sorted ids. `special_tokens`: text -> id of every special token; `templates`: all chat templates."""
    written = "\n".join(templates)
    ids = {i for i in stated if i is not None}
    for text, token_id in special_tokens.items():
        if text in END_MARKERS and (text not in _ONLY_IN_TEMPLATE or text in written):
            ids.add(token_id)
    return tuple(sorted(ids))
