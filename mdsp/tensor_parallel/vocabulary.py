"""The two ends of the model, split along the vocabulary: embedding, and cross entropy on split logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mdsp.tensor_parallel.collectives import all_reduce, reduce_output
from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.parameters import ParameterBuilder


class VocabParallelEmbedding(nn.Module):
    """y = weight[ids], rows split over the group: each rank looks up the ids it owns, the sum is the embedding.

    Holds nothing but the weight, which may be tied to the vocabulary head.
    """

    def __init__(self, builder: ParameterBuilder, name: str = "embedding.weight") -> None:
        super().__init__()
        self.group = builder.group
        self.weight = builder.build(name)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, seq] -> [seq (/ tp), batch, hidden]."""
        ids = ids.t()
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.group.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_output(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class _VocabParallelCrossEntropy(Function):
    """Per token log(sum_v exp(z_v)) - z_label with z split along v; nothing of vocabulary size is communicated.

    Two collectives: the maximum; then the sum of exponentials together with the label's logit. Kept for the backward
    pass: the logits themselves, and one number per token.
    """

    # Rows are handled in blocks so that the fp32 copies of bf16 logits stay small.
    BLOCK_ELEMENTS = 1 << 24

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: TensorGroup) -> Tensor:
        shape = labels.shape
        flat, target = logits.flatten(0, -2), labels.flatten()
        width = flat.shape[-1]
        local = target - group.rank * width
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)
        # Columns past the true vocabulary are padding: they never take part.
        used = min(max(vocab_size - group.rank * width, 0), width)
        tokens = flat.shape[0]
        step = max(1, _VocabParallelCrossEntropy.BLOCK_ELEMENTS // width)

        peak = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=logits.device)
        if used:
            peak = flat[:, :used].amax(-1).float()
        if group.size > 1:
            all_reduce(peak, group, dist.ReduceOp.MAX)
        sums = torch.zeros(2, tokens, dtype=torch.float32, device=logits.device)
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            sums[0, rows] = (flat[rows, :used].float() - peak[rows, None]).exp_().sum(-1)
        own = flat.gather(-1, local.unsqueeze(-1)).squeeze(-1).float() - peak
        sums[1] = own.masked_fill(elsewhere, 0.0)
        if group.size > 1:
            all_reduce(sums, group)
        ctx.save_for_backward(flat, local, elsewhere, peak + sums[0].log())
        ctx.used, ctx.step, ctx.logits_shape = used, step, logits.shape
        return (sums[0].log() - sums[1]).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        flat, local, elsewhere, log_sum = ctx.saved_tensors
        used, step = ctx.used, ctx.step
        scale = grad.flatten().float()
        out = torch.empty_like(flat)
        out[:, used:] = 0.0
        for start in range(0, flat.shape[0], step):
            rows = slice(start, start + step)
            probability = (flat[rows, :used].float() - log_sum[rows, None]).exp_()
            out[rows, :used] = probability.mul_(scale[rows, None])
        out.scatter_add_(-1, local.unsqueeze(-1), -scale.masked_fill(elsewhere, 0.0).to(out.dtype).unsqueeze(-1))
        return out.view(ctx.logits_shape), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, group: TensorGroup) -> Tensor:
    """Cross entropy of each token, in fp32 and nats, without gathering logits.

    Args:
        logits: [seq, batch, padded vocabulary / tp], this rank's columns, any float dtype.
        labels: [seq, batch] token ids of the whole vocabulary, on every rank of the group.
        vocab_size: true number of tokens; columns past it are ignored.

    Returns:
        [seq, batch], the same on every rank of the group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, group)
