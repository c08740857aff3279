"""Names of the files of a sharded checkpoint (DeepSpeed's pipeline layout), and which degrees a model can have."""

from __future__ import annotations

from pathlib import Path

from mdsp.errors import CheckpointError, ConfigError
from mdsp.model.config import ModelConfig
from mdsp.model.table import Parameter, head_layer, parameter_table, pipeline_layer_count

LATEST = "latest"
"""File with the tag of the newest checkpoint."""
LATEST_UNIVERSAL = "latest_universal"
"""The same of a checkpoint in universal form; DeepSpeed's `load_universal` looks for it."""
MANIFEST = "mdsp.json"
"""Manifest inside a tag's directory; written last."""
HF_FILES = "hf"
"""Directory inside a tag's directory: tokenizer, generation config, chat template, the original `config.json`."""


def layer_file(layer: int, rank: int) -> str:
    """File of one pipeline layer and tensor rank; DeepSpeed looks for this name. Layers above 99 get more digits."""
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def state_file(rank: int) -> str:
    """File of the engine's state for one of the `tensor x pipeline` model-parallel ranks."""
    return f"mp_rank_{rank:02d}_model_states.pt"


def optimizer_file(precision: str, data_rank: int, rank: int) -> str:
    """File of one data rank's share of master weights and optimizer state of a model-parallel rank."""
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_optim_states.pt"


def stored_layers(config: ModelConfig) -> tuple[int, ...]:
    """Pipeline layers that have files: all but a tied head, whose weight lies in the embedding's file."""
    return tuple(
        layer for layer in range(pipeline_layer_count(config)) if not (config.tied_head and layer == head_layer(config))
    )


def stored_parameters(config: ModelConfig, layer: int) -> tuple[Parameter, ...]:
    """Parameters in the files of a layer: those that it owns; tied copies are stored with their owner."""
    return tuple(parameter for parameter in parameter_table(config).by_layer[layer] if parameter.layer == layer)


def check_degrees(config: ModelConfig, tensor: int, pipeline: int) -> None:
    """Refuse degrees that would cut a head or a column, or leave a stage without a block.

    Raises:
        ConfigError: naming the field, the value and the nearest legal degrees.
    """
    if tensor < 1 or pipeline < 1:
        raise ConfigError(f"degrees must be at least 1, not tensor {tensor} and pipeline {pipeline}")
    for field, size in (("n_heads", config.n_heads), ("ffn_size", config.ffn_size)):
        if size % tensor:
            raise ConfigError(
                f"tensor-parallel degree {tensor} does not divide {field} {size}; legal degrees near it are "
                f"{_near(config, tensor)}"
            )
    if pipeline > config.n_layers:
        raise ConfigError(
            f"pipeline-parallel degree {pipeline} is more than the model's {config.n_layers} blocks; every stage needs "
            f"one, use at most {config.n_layers}"
        )


def _near(config: ModelConfig, wanted: int) -> str:
    legal = [d for d in range(1, config.n_heads + 1) if config.n_heads % d == 0 and config.ffn_size % d == 0]
    return ", ".join(str(d) for d in sorted(sorted(legal, key=lambda d: abs(d - wanted))[:4]))


def tag_directory(path: Path) -> Path:
    """The directory with the manifest: `path` itself, or the tag that its `latest` names.

    Raises:
        CheckpointError: neither is there, or `latest` names something outside.
    """
    if (path / MANIFEST).is_file():
        return path
    latest = path / LATEST
    if not latest.is_file():
        raise CheckpointError(f"{path} holds no checkpoint: there is neither {MANIFEST} nor {LATEST} in it")
    tag = latest.read_text(encoding="utf-8", errors="replace")[:256].strip()
    if not tag or tag in (".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise CheckpointError(f"{latest} names {tag!r}, which is not a directory beside it")
    directory = path / tag
    if not directory.is_dir():
        raise CheckpointError(f"{latest} names {tag!r}, but {directory} does not exist; the checkpoint is incomplete")
    return directory
