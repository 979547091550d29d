"""The members of a bundle that are text: tokenizer, templates, settings, audit; and whether one can chat with them."""

from __future__ import annotations

import dataclasses

from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.integrity import canonical_json
from relaxpack.errors import RelaxpackError
from relaxpack.relax_models.checkpoint import Checkpoint


def write_text_members(writer: BundleWriter, checkpoint: Checkpoint) -> None:
    """Add `tokenizer/*` and `audit.json`."""
    assets = checkpoint.assets
    for name, data in assets.files.items():
        writer.add_bytes(f"tokenizer/{name}", data)
    generation = {k: v for k, v in dataclasses.asdict(checkpoint.generation).items() if v is not None}
    writer.add_bytes("tokenizer/text.json", canonical_json({
        "chat_template": assets.chat_template, "named_templates": assets.named_templates,
        "bos_token": assets.bos_token, "eos_token": assets.eos_token, "bos_token_id": assets.bos_token_id,
        "end_token_ids": list(assets.end_token_ids), "add_bos": assets.add_bos,
        "special_tokens": assets.special_tokens, "generation": generation}))
    writer.add_bytes("audit.json", canonical_json(checkpoint.audit.to_json()))


def chat_problem(checkpoint: Checkpoint) -> str | None:
    """Why nobody can chat with this model, if so: no template, or one that does not render the simplest chat."""
    from relaxpack.runtime.chat_template import ChatTemplate
    from relaxpack.runtime.tokenizer import TextInfo, Tokenizer

    assets = checkpoint.assets
    text = TextInfo(assets.chat_template, assets.named_templates, assets.bos_token, assets.eos_token,
                    special_tokens=assets.special_tokens)
    try:
        ChatTemplate(Tokenizer(assets.files["tokenizer.json"].decode(), text)).encode([{"role": "user", "content": "Hi"}])
    except RelaxpackError as error:
        return str(error)
    return None
