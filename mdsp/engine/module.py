"""PipelineGPT: the model's layers as a DeepSpeed PipelineModule, cut into stages at given blocks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from itertools import accumulate

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor

from mdsp.model.block import Block
from mdsp.model.context import ModelContext
from mdsp.model.layers import FinalNorm, Head, PositionLayer, run_layers, token_losses, vocabulary_logits
from mdsp.model.table import FIRST_BLOCK_LAYER, pipeline_layer_count
from mdsp.tensor_parallel.parameters import ParameterBuilder
from mdsp.tensor_parallel.vocabulary import VocabParallelEmbedding
from mdsp.topology import Topology

TIED_KEY = "embedding"


def layer_specs(builder: ParameterBuilder, context: ModelContext) -> list[LayerSpec]:
    """One spec per pipeline layer, in the order that the parameter table numbers them."""
    config = context.config

    def tied_head(embedding: VocabParallelEmbedding, x: Tensor) -> Tensor:
        return vocabulary_logits(x, embedding.weight, None, context)

    if config.tied_head:
        first = TiedLayerSpec(TIED_KEY, VocabParallelEmbedding, builder, tied_weight_attr="weight")
        last = TiedLayerSpec(TIED_KEY, VocabParallelEmbedding, builder, forward_fn=tied_head, tied_weight_attr="weight")
    else:
        first = LayerSpec(VocabParallelEmbedding, builder)
        last = LayerSpec(Head, builder, context)
    blocks = [LayerSpec(Block, builder, index, context) for index in range(config.n_layers)]
    specs = [first, LayerSpec(PositionLayer, builder, context), *blocks, LayerSpec(FinalNorm, builder, context), last]
    assert len(specs) == pipeline_layer_count(config)
    return specs


class WeightedTokenLoss:
    """sum(token loss * weight): the share of one micro-batch in the mean over the global batch.

    DeepSpeed divides the sum over micro-batches by gradient_accumulation_steps and averages over data ranks. With
    weight = mask * gradient_accumulation_steps * data / (target tokens of the global batch), the result is the token
    mean of the global batch whatever the masks.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def __call__(self, logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """logits [seq, batch, padded vocabulary / tp]; targets: labels and weights, each [batch, seq]."""
        labels, weights = targets
        return (token_losses(logits, labels, self.context) * weights.t()).sum()


class PipelineGPT(PipelineModule):
    """This rank's stage of the model. `blocks_per_stage` cuts it; embedding and head go with the outer stages."""

    def __init__(
        self, builder: ParameterBuilder, context: ModelContext, topology: Topology, blocks_per_stage: Sequence[int]
    ) -> None:
        bounds = [FIRST_BLOCK_LAYER + count for count in accumulate(blocks_per_stage)]
        self._bounds = [0, *bounds[:-1], pipeline_layer_count(context.config)]
        self.context = context
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints every layer
            super().__init__(
                layers=layer_specs(builder, context),
                topology=topology.deepspeed(),
                loss_fn=WeightedTokenLoss(context),
                activation_checkpoint_interval=0,  # recomputation is ours: see run_layers
            )

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def forward(self, forward_input: Tensor) -> Tensor:
        return run_layers(self.forward_funcs, forward_input, self.context, self.training)
