"""Compares two checkpoints of any kind: every parameter by hash, and on request what each layer computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdsp.checkpoint.jobs import default_threads, run_jobs
from mdsp.checkpoint.layout import stored_layers, stored_parameters
from mdsp.checkpoint.stream import hash_pieces
from mdsp.checkpoint.weights import HfWeights, ShardedWeights, Weights, open_weights
from mdsp.errors import CheckpointError
from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table

LOGITS_TOLERANCE = 1e-4
"""Largest difference of activations, relative to the largest activation, that is taken for rounding in float32."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    parameters: int
    """Parameters, or other tensors, that both have."""
    differences: tuple[str, ...]
    """One line per difference; empty when the two are the same."""


def compare(
    a: Path, b: Path, progress: Callable[[int], None] = lambda done: None, threads: int | None = None
) -> Comparison:
    """Compare two checkpoints parameter by parameter; stored hashes are checked on the way.

    Raises:
        CheckpointError: one of them is unfinished, damaged, or of a model that cannot be compared.
    """
    first, second = open_weights(a), open_weights(b)
    differences = _config_differences(first.config, second.config)
    ours, theirs = parameter_table(first.config).by_name, parameter_table(second.config).by_name
    differences += [f"{name}: only in {a}" for name in ours if name not in theirs]
    differences += [f"{name}: only in {b}" for name in theirs if name not in ours]
    found: dict[str, str] = {}
    lock = threading.Lock()

    def job(layer: int) -> None:
        first.verify(layer)
        if layer in stored_layers(second.config):
            second.verify(layer)
        for parameter in stored_parameters(first.config, layer):
            other = theirs.get(parameter.name)
            if other is None:
                continue
            problem = None
            if parameter.shape != other.shape:
                problem = f"shape {list(parameter.shape)} and {list(other.shape)}"
            elif first.dtype(parameter) != second.dtype(other):
                problem = f"type {first.dtype(parameter)} and {second.dtype(other)}"
            elif _hash(first, parameter.name) != _hash(second, parameter.name):
                problem = "values differ"
            if problem is not None:
                with lock:
                    found[parameter.name] = f"{parameter.name}: {problem}"
            progress(parameter.numel * first.dtype(parameter).itemsize)

    run_jobs(stored_layers(first.config), job, threads or default_threads())
    differences += [found[name] for name in ours if name in found]
    return Comparison(len(set(ours) & set(theirs)), tuple(differences))


def _hash(weights: Weights, name: str) -> str:
    parameter = parameter_table(weights.config).by_name[name]
    return hash_pieces((weights.pieces(parameter, 1, 0),), weights.dtype(parameter))


def _config_differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    return [
        f"model: {name} {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in ModelConfig.model_fields
        if getattr(a, name) != getattr(b, name)
    ]


@dataclass(frozen=True)
class LayerDifference:
    """Activations of one layer in the two models, on the same tokens."""

    name: str
    """embedding, block N, final norm, or logits."""
    relative: float
    """Largest difference, relative to the largest activation."""


def compare_activations(a: Path, b: Path, seq: int = 32, seed: int = 0) -> tuple[LayerDifference, ...]:
    """Run both models in float32 on the same random tokens; the difference after the embedding and after each layer.

    A Hugging Face directory is run by `transformers`, a sharded checkpoint by mdsp, so that comparing an export or an
    import with the other side compares two independent implementations. Needs the memory of both models.

    Raises:
        CheckpointError: the two models have not the same number of layers and tokens.
    """
    first, second = open_weights(a), open_weights(b)
    sizes = [(one.config.n_layers, one.config.hidden_size, one.config.vocab_size) for one in (first, second)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"layers, hidden size and vocabulary are {sizes[0]} in {a} and {sizes[1]} in {b}; their activations cannot "
            f"be compared"
        )
    generator = torch.Generator().manual_seed(seed)
    length = min(seq, first.config.max_positions, second.config.max_positions)
    ids = torch.randint(first.config.vocab_size, (2, length), generator=generator)
    ours, theirs = _activations(first, ids), _activations(second, ids)
    return tuple(LayerDifference(name, _relative(ours[name], theirs[name])) for name in ours if name in theirs)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def _activations(weights: HfWeights | ShardedWeights, ids: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return _of_transformers(weights, ids) if isinstance(weights, HfWeights) else _of_mdsp(weights, ids)


def _of_mdsp(weights: ShardedWeights, ids: Tensor) -> dict[str, Tensor]:
    """[batch, seq, hidden] after each layer, from mdsp's own model."""
    from mdsp.model.layers import SingleProcessGPT

    model = SingleProcessGPT(weights.config, weights, torch.float32).eval()
    _, *states = model.hidden_states(ids)
    names = _names(weights.config)
    found = {name: state.transpose(0, 1) for name, state in zip(names, states, strict=True)}
    return found | {"logits": model(ids)}


def _of_transformers(weights: HfWeights, ids: Tensor) -> dict[str, Tensor]:
    """[batch, seq, hidden] after each layer, from `transformers`."""
    import transformers

    transformers.logging.disable_progress_bar()  # it draws into pipes and files as well
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(
        weights.path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    output = model(ids, output_hidden_states=True, use_cache=False)
    # The last hidden state of `transformers` is already normalised, so the last block has none of its own.
    names = _names(weights.config)
    return dict(zip([*names[:-2], names[-1]], output.hidden_states, strict=True)) | {"logits": output.logits}


def _names(config: ModelConfig) -> list[str]:
    return ["embedding", *(f"block {index}" for index in range(config.n_layers)), "final norm"]
