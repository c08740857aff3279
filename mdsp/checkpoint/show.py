"""Says what a directory is: family, sizes, degrees, tensors, types, tokenizer, complete or not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mdsp.checkpoint.hf_files import carried_files
from mdsp.checkpoint.manifest import Manifest
from mdsp.checkpoint.partial import JOURNAL
from mdsp.checkpoint.verify import open_any_manifest
from mdsp.checkpoint.weights import HfWeights, ShardedWeights, dtype_name, open_weights
from mdsp.errors import CheckpointError
from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table

_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def describe(path: Path) -> dict[str, str]:
    """What is at `path`, as pairs of a word and its value, in the order in which they are shown.

    Raises:
        ConfigError, CheckpointError: it is neither a model of a known family nor a checkpoint, or it is damaged.
    """
    journal = path / JOURNAL
    if journal.is_file():
        return _unfinished(path, journal)
    weights = open_weights(path)
    if isinstance(weights, HfWeights):
        return _hf(weights)
    return _sharded(weights)


def _unfinished(path: Path, journal: Path) -> dict[str, str]:
    lines = []
    for line in journal.read_bytes().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    plan = lines[0] if lines and isinstance(lines[0], dict) else {}
    return {
        "kind": f"unfinished conversion to a {plan.get('make', 'checkpoint')}",
        "complete": f"no, {max(0, len(lines) - 1)} parts are finished; run the same command again",
    }


def _model(config: ModelConfig) -> dict[str, str]:
    heads = f"{config.n_heads} heads of {config.head_dim}"
    if config.n_kv_heads != config.n_heads:
        heads += f", {config.n_kv_heads} key/value heads"
    return {
        "family": config.family,
        "parameters": f"{parameter_table(config).numel:,}",
        "size": f"{config.n_layers} layers x {config.hidden_size}, {heads}, MLP {config.ffn_size}",
        "vocabulary": f"{config.vocab_size}, head {'tied' if config.tied_head else 'not tied'}",
        "positions": f"{config.position}, at most {config.max_positions}",
    }


def _types(weights: HfWeights | ShardedWeights) -> str:
    sizes: Counter[str] = Counter()
    for parameter in parameter_table(weights.config):
        sizes[dtype_name(weights.dtype(parameter))] += parameter.numel
    total = sum(sizes.values())
    if len(sizes) == 1:
        return next(iter(sizes))
    return ", ".join(f"{name} ({count / total:.1%})" for name, count in sizes.most_common())


def _tokenizer(names: list[str]) -> str:
    return ", ".join(name for name in names if name in _TOKENIZER) or "none"


def _hf(weights: HfWeights) -> dict[str, str]:
    tensors = weights.directory.tensors
    files = {tensor.file for tensor in tensors.values()}
    return {
        "kind": "Hugging Face directory",
        **_model(weights.config),
        "tensors": f"{len(tensors)} in {len(files)} file{'s' * (len(files) > 1)}",
        "left aside": ", ".join(weights.left_aside) or "none",
        "type": _types(weights),
        "tokenizer": _tokenizer(carried_files(weights.path)),
        "complete": "yes: every tensor of the model is there once",
    }


def _optimizer_state(manifest: Manifest) -> str:
    state = manifest.training
    if state is None:
        return "none"
    if state.optimizer_form == "per_rank":
        layout = f"tensor {manifest.tensor} x pipeline {manifest.pipeline} x data {state.data}"
        return f"{state.optimizer}, a file per rank, for {layout}"
    paths = [file.file.split("/") for file in manifest.files]
    keys = {path[2].removesuffix(".pt") for path in paths if len(path) == 3}
    return f"{state.optimizer} in universal form, for any layout: {', '.join(sorted(keys))} of each parameter"


def _sharded(weights: ShardedWeights) -> dict[str, str]:
    manifest = weights.manifest
    counters = manifest.counters
    try:
        open_any_manifest(weights.directory)
        complete = "yes: manifest and all files are there"
    except CheckpointError as error:
        complete = f"no: {error}"
    return {
        "kind": f"sharded checkpoint ({manifest.what})",
        "directory": str(weights.directory),
        **_model(weights.config),
        "degrees": f"tensor {manifest.tensor} x pipeline {manifest.pipeline}",
        "blocks per stage": ", ".join(str(count) for count in manifest.blocks_per_stage),
        "tensors": f"{len(manifest.tensors)} in {len({entry.file for entry in manifest.tensors})} files",
        "type": _types(weights),
        "tokenizer": _tokenizer([entry.file.rpartition("/")[2] for entry in manifest.hf_files]),
        "training": f"step {counters.step}, {counters.samples:,} samples, {counters.tokens:,} tokens",
        "optimizer state": _optimizer_state(manifest),
        "origin": str(manifest.origin.get("path", "training")),
        "complete": complete,
    }
