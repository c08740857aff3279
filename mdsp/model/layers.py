"""The pipeline layers of a GPT, in order, and the same layers as one module for a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mdsp.model.block import Block
from mdsp.model.config import ModelConfig
from mdsp.model.context import ModelContext
from mdsp.model.norm import Norm
from mdsp.model.table import FIRST_BLOCK_LAYER, parameter_table
from mdsp.tensor_parallel.collectives import sequence_slice
from mdsp.tensor_parallel.linear import column_parallel
from mdsp.tensor_parallel.parameters import ParameterBuilder, RandomWeights, WeightSource, entry_of
from mdsp.tensor_parallel.random import Moment
from mdsp.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy


class PositionLayer(nn.Module):
    """What follows the token embedding: multiplier, learned positions, embedding norm, dropout."""

    def __init__(self, builder: ParameterBuilder, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        self.context = context
        self.multiplier = config.embedding_multiplier
        self.offset = config.position_offset
        self.weight = builder.build_optional("position.weight")
        self.norm = Norm(builder, "embedding_norm", config, config.norm) if config.embedding_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same shape."""
        group = self.context.group
        if self.multiplier != 1.0:
            x = x * torch.tensor(self.multiplier, dtype=x.dtype, device=x.device)
        if self.weight is not None:
            seq = x.shape[0] * (group.size if group.splits_sequence else 1)
            position = self.weight[self.offset : self.offset + seq]
            if group.splits_sequence:
                position = sequence_slice(position, group)
            x = x + position.unsqueeze(1)
        if self.norm is not None:
            x = self.norm(x)
        probability = self.context.config.embedding_dropout
        return self.context.streams.dropout(x, probability, self.training, "embedding", group.splits_sequence)


class FinalNorm(nn.Module):
    """The norm before the vocabulary head."""

    def __init__(self, builder: ParameterBuilder, context: ModelContext) -> None:
        super().__init__()
        self.norm = Norm(builder, "final_norm", context.config)

    def forward(self, x: Tensor) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same shape."""
        return self.norm(x)


def vocabulary_logits(x: Tensor, weight: Tensor, bias: Tensor | None, context: ModelContext) -> Tensor:
    """[seq (/ tp), batch, hidden] -> logits [seq, batch, padded vocabulary / tp], scaled and capped."""
    config = context.config
    (logits,) = column_parallel(x, (weight,), (bias,), context.group)
    if config.logit_multiplier != 1.0:
        logits = logits * config.logit_multiplier
    if config.logit_softcap is not None:
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    return logits


class Head(nn.Module):
    """The untied vocabulary head."""

    def __init__(self, builder: ParameterBuilder, context: ModelContext) -> None:
        super().__init__()
        self.context = context
        self.weight = builder.build("head.weight")
        self.bias = builder.build_optional("head.bias")

    def forward(self, x: Tensor) -> Tensor:
        return vocabulary_logits(x, self.weight, self.bias, self.context)


def token_losses(logits: Tensor, labels: Tensor, context: ModelContext) -> Tensor:
    """Cross entropy of each token: logits [seq, batch, padded vocabulary / tp], labels [batch, seq] -> [seq, batch]."""
    return vocab_parallel_cross_entropy(logits, labels.t(), context.config.vocab_size, context.group)


def run_layers(
    layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor, context: ModelContext, training: bool
) -> Tensor:
    """Apply layers in order; with recompute "full", keep only the input of every `recompute_interval`-th block.

    Layers that are not blocks are never recomputed: they are cheap, or they end in the loss.
    """
    if context.recompute != "full" or not training or not torch.is_grad_enabled():
        for layer in layers:
            x = layer(x)
        return x
    moment, position = context.streams.moment, 0
    while position < len(layers):
        run: list[Callable[[Tensor], Tensor]] = [layers[position]]
        position += 1
        if not isinstance(run[0], Block):
            x = run[0](x)
            continue
        while position < len(layers) and isinstance(layers[position], Block) and len(run) < context.recompute_interval:
            run.append(layers[position])
            position += 1
        x = checkpoint(_run_at, moment, context, run, x, use_reentrant=False, preserve_rng_state=False)
    return x


def _run_at(moment: Moment, context: ModelContext, run: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    with context.streams.at(moment):
        for layer in run:
            x = layer(x)
    return x


class SingleProcessGPT(nn.Module):
    """The whole model in one process, without torch.distributed or DeepSpeed; parameters named as in the table.

    For checks against other implementations and for small experiments; training uses `mdsp.engine`.
    """

    def __init__(
        self, config: ModelConfig, source: WeightSource | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.context = ModelContext(config)
        builder = ParameterBuilder(parameter_table(config), self.context.group, source or RandomWeights(0), dtype)
        self.embedding = VocabParallelEmbedding(builder)
        self.position = PositionLayer(builder, self.context)
        self.blocks = nn.ModuleList(Block(builder, index, self.context) for index in range(config.n_layers))
        self.final_norm = FinalNorm(builder, self.context)
        self.head = None if config.tied_head else Head(builder, self.context)

    def hidden_states(self, ids: Tensor) -> list[Tensor]:
        """Output of every pipeline layer but the head: [seq, batch, hidden] each; entry i belongs to layer i."""
        states = [self.embedding(ids)]
        for layer in (self.position, *self.blocks, self.final_norm):
            states.append(layer(states[-1]))
        assert len(states) == FIRST_BLOCK_LAYER + len(self.blocks) + 1
        return states

    def sequence_first_logits(self, ids: Tensor) -> Tensor:
        """ids [batch, seq] -> logits [seq, batch, padded vocabulary], as `token_losses` takes them."""
        x = self.embedding(ids)
        x = run_layers((self.position, *self.blocks, self.final_norm), x, self.context, self.training)
        head = self.head
        return vocabulary_logits(x, self.embedding.weight, None, self.context) if head is None else head(x)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, seq] -> logits [batch, seq, vocabulary], without padding."""
        return self.sequence_first_logits(ids).transpose(0, 1)[..., : self.context.config.vocab_size]

    def parameters_by_entry(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the table."""
        return {entry_of(parameter).name: parameter for parameter in self.parameters()}
