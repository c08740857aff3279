"""FLOPs of a step: the one formula, derived from the parameter table. No torch.

A multiply-add is two FLOPs, and only matrix products count. For one sequence of `s` tokens, forward:

    matrices        2 s (elements of every weight matrix of the blocks)
    attention core  4 n_heads head_dim pairs               per block: queries x keys, probabilities x values
    head            2 s hidden_size vocab_size             true vocabulary, tied or not
    embedding       0                                      a lookup

`pairs` is the number of query-key pairs, and its convention is part of every name here:

    "half"   s^2 / 2   what causal attention needs; kernels that skip masked blocks compute about this
    "full"   s^2       twice that, as if nothing were masked (Narayanan 2021, Korthikanti 2022, PaLM)

Packed documents attend to themselves only: `s^2` becomes the sum of squared document lengths. A sliding window `w`
leaves `s w - w^2 / 2` of the half pairs. Grouped-query attention and gated MLPs need no rule of their own: their
matrices stand in the table with their true shapes.

The backward pass is twice the forward one (Kaplan et al. 2020), so

    model FLOPs     3 forward                                            independent of how it is computed
    hardware FLOPs  model FLOPs + what recomputation repeats             "selective": the attention core of all blocks
                                                                         "full": the forward of all blocks, not the head
    MFU, HFU        model or hardware FLOPs / (seconds x devices x peak FLOP/s)      (PaLM, appendix B)

Norms, softmax, activations, biases, the optimizer, vocabulary padding, and what flash attention recomputes inside its
backward kernel are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mdsp.errors import ConfigError
from mdsp.model.config import ModelConfig
from mdsp.model.table import FIRST_BLOCK_LAYER, head_layer, parameter_table, pipeline_layer_count

AttentionConvention = Literal["half", "full"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Forward FLOPs of one sequence, by part."""

    attention_matrices: float = 0.0
    """Query, key, value and output projections."""
    attention_core: float = 0.0
    """Queries x keys and probabilities x values."""
    mlp: float = 0.0
    """The MLP's two, or three when gated, matrices."""
    head: float = 0.0
    """Projection on the true vocabulary."""

    @property
    def blocks(self) -> float:
        """Everything but the head."""
        return self.attention_matrices + self.attention_core + self.mlp

    @property
    def total(self) -> float:
        return self.blocks + self.head

    def __add__(self, other: ForwardFlops) -> ForwardFlops:
        return ForwardFlops(
            self.attention_matrices + other.attention_matrices,
            self.attention_core + other.attention_core,
            self.mlp + other.mlp,
            self.head + other.head,
        )


def attention_pairs(
    seq_length: int,
    attention: AttentionConvention,
    document_lengths: Sequence[int] | None = None,
    window: int | None = None,
) -> float:
    """Query-key pairs of one sequence in one head.

    `document_lengths` are the lengths of the documents packed in the sequence; None means one document. Raises
    ConfigError when they do not add up to `seq_length`, because a wrong count would go unnoticed.
    """
    lengths = (seq_length,) if document_lengths is None else tuple(document_lengths)
    if sum(lengths) != seq_length or any(length < 0 for length in lengths):
        raise ConfigError(
            f"document lengths {list(lengths)[:8]} add up to {sum(lengths)}, not to the sequence length {seq_length}; "
            f"give every document of the sequence, the cut ones with the part that is in it"
        )
    half = 0.0
    for length in lengths:
        hidden_by_window = max(0, length - window) if window is not None else 0
        half += (length * length - hidden_by_window * hidden_by_window) / 2
    return half if attention == "half" else 2 * half


def layer_forward_flops(
    config: ModelConfig,
    layer: int,
    seq_length: int,
    attention: AttentionConvention = "half",
    document_lengths: Sequence[int] | None = None,
) -> ForwardFlops:
    """Forward FLOPs of one sequence in one pipeline layer (numbered as in `mdsp.model.table`)."""
    table = parameter_table(config)
    if layer == head_layer(config):
        weight = table.by_name["embedding.weight" if config.tied_head else "head.weight"]
        return ForwardFlops(head=2.0 * seq_length * weight.numel)
    block = layer - FIRST_BLOCK_LAYER
    if not 0 <= block < config.n_layers:
        return ForwardFlops()
    matrices = [p for p in table.by_layer[layer] if len(p.shape) == 2]
    windowed = config.sliding_window_layers == "all" or block % 2 == 0
    pairs = attention_pairs(seq_length, attention, document_lengths, config.sliding_window if windowed else None)
    return ForwardFlops(
        attention_matrices=2.0 * seq_length * sum(p.numel for p in matrices if p.attribute.startswith("attention.")),
        attention_core=4.0 * config.n_heads * config.head_dim * pairs,
        mlp=2.0 * seq_length * sum(p.numel for p in matrices if p.attribute.startswith("mlp.")),
    )


def forward_flops(
    config: ModelConfig,
    seq_length: int,
    attention: AttentionConvention = "half",
    document_lengths: Sequence[int] | None = None,
) -> ForwardFlops:
    """Forward FLOPs of one sequence in the whole model."""
    # Blocks differ only by their window, so two of them say everything about a model of a hundred.
    first = layer_forward_flops(config, FIRST_BLOCK_LAYER, seq_length, attention, document_lengths)
    second = first
    if config.n_layers > 1:
        second = layer_forward_flops(config, FIRST_BLOCK_LAYER + 1, seq_length, attention, document_lengths)
    n_even, n_odd = -(-config.n_layers // 2), config.n_layers // 2
    head = layer_forward_flops(config, head_layer(config), seq_length, attention, document_lengths)
    return ForwardFlops(
        n_even * first.attention_matrices + n_odd * second.attention_matrices,
        n_even * first.attention_core + n_odd * second.attention_core,
        n_even * first.mlp + n_odd * second.mlp,
        head.head,
    )


def model_flops(
    config: ModelConfig,
    seq_length: int,
    attention: AttentionConvention = "half",
    document_lengths: Sequence[int] | None = None,
) -> float:
    """Model FLOPs of training on one sequence: forward and backward, nothing recomputed."""
    return 3 * forward_flops(config, seq_length, attention, document_lengths).total


def recompute_flops(forward: ForwardFlops, recompute: Recompute) -> float:
    """FLOPs that activation recomputation repeats, for the forward FLOPs given."""
    if recompute == "full":
        return forward.blocks
    return forward.attention_core if recompute == "selective" else 0.0


def hardware_flops(
    config: ModelConfig,
    seq_length: int,
    recompute: Recompute,
    attention: AttentionConvention = "half",
    document_lengths: Sequence[int] | None = None,
) -> float:
    """Hardware FLOPs of training on one sequence: model FLOPs and what recomputation repeats."""
    forward = forward_flops(config, seq_length, attention, document_lengths)
    return 3 * forward.total + recompute_flops(forward, recompute)


def model_flops_per_token(config: ModelConfig, seq_length: int, attention: AttentionConvention = "half") -> float:
    """Model FLOPs per trained token at one sequence length."""
    return model_flops(config, seq_length, attention) / seq_length


def stage_forward_flops(
    config: ModelConfig, layers: Sequence[int], seq_length: int, attention: AttentionConvention = "half"
) -> ForwardFlops:
    """Forward FLOPs of one sequence in the pipeline layers of one stage."""
    total = ForwardFlops()
    for layer in layers:
        if not 0 <= layer < pipeline_layer_count(config):
            raise ConfigError(f"pipeline layer {layer} does not exist; there are {pipeline_layer_count(config)}")
        total = total + layer_forward_flops(config, layer, seq_length, attention)
    return total


def tflops_per_device(flops_per_step: float, step_s: float, devices: int) -> float:
    """Rate per device in TFLOP/s; `flops_per_step` counts all sequences of the global batch."""
    return flops_per_step / (step_s * devices) / 1e12


def utilization(flops_per_step: float, step_s: float, devices: int, peak_flops_per_s: float | None) -> float | None:
    """MFU from model FLOPs, HFU from hardware FLOPs, in 0..1; None when the device's peak is not known."""
    if not peak_flops_per_s:
        return None
    return flops_per_step / (step_s * devices * peak_flops_per_s)
