"""What a bundle says about itself: model info, key and manifest, from the checkpoint and the targets built."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import relaxpack
from relaxpack import tvm_setup
from relaxpack.compile.one_target import Built
from relaxpack.compile.options import BuildOptions
from relaxpack.compile.target_plan import TargetPlan
from relaxpack.dist.integrity import canonical_json, sha256_bytes
from relaxpack.dist.key import artifact_key
from relaxpack.dist.manifest import Manifest, WeightsSummary
from relaxpack.model_info import ModelInfo
from relaxpack.relax_models.checkpoint import Checkpoint
from relaxpack.relax_models.export import BuildLimits


def model_info(checkpoint: Checkpoint, limits: BuildLimits, plan: TargetPlan) -> ModelInfo:
    """Of a bundle's first target; others differ in their dtypes alone."""
    c, assets = checkpoint.config, checkpoint.assets
    return ModelInfo(checkpoint.source.name, c.architecture, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads,
                     c.head_dim, c.vocab_size, limits.max_context, limits.page_size, plan.kv_dtype, plan.activation_dtype,
                     limits.max_batch, limits.prefill_chunk, assets.bos_token_id, assets.end_token_ids, assets.add_bos)


def make_manifest(checkpoint: Checkpoint, info: ModelInfo, built: Sequence[Built], options: BuildOptions) -> Manifest:
    """Without members, which the writer adds."""
    stored: Counter[str] = Counter()
    for one in built:
        stored.update(one.stored)
    compiler = {"apache-tvm": tvm_setup.TVM_VERSION}
    source = checkpoint.source.to_json()
    key = artifact_key(source_digest=source_digest(checkpoint, built), relaxpack_version=relaxpack.__version__,
                       compiler=compiler, targets=[one.plan.spec.to_json() for one in built], weights=options.weights,
                       build_options=options.to_json(),
                       tuning_records=[record for one in built for record in one.entry.tuning_records])
    return Manifest(relaxpack.__version__, key, info, WeightsSummary(dict(sorted(stored.items()))),
                    tuple(one.entry for one in built), compiler, source, options.to_json())


def source_digest(checkpoint: Checkpoint, built: Sequence[Built]) -> str:
    """Names the checkpoint by its content: where it came from, its config, everything about text, and each number that
    went into a parameter (by the digest of the parameter, made while it was written)."""
    assets = dataclasses.asdict(checkpoint.assets)
    assets["files"] = {name: sha256_bytes(data) for name, data in checkpoint.assets.files.items()}
    return sha256_bytes(canonical_json({
        "source": checkpoint.source.to_json(), "config": checkpoint.config.to_json(), "assets": assets,
        "audit": checkpoint.audit.to_json(), "generation": dataclasses.asdict(checkpoint.generation),
        "parameters": {one.plan.spec.name: one.digests for one in built}}))
