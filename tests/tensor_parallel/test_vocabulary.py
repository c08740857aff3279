"""Vocabulary-parallel embedding and cross entropy against torch's on whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.vocabulary import (
    VocabParallelEmbedding,
    _VocabParallelCrossEntropy,
    vocab_parallel_cross_entropy,
)
from tests.harness import run_ranks
from tests.tensor_parallel.builder import BATCH, FIELDS, SEQ, builder_for, sequence_piece, whole_tensors, world_group

VOCAB, PADDED = FIELDS["vocab_size"], 256


def _ids() -> Tensor:
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    ids.view(-1)[:6] = torch.tensor([0, 63, 64, 127, 128, VOCAB - 1])  # both sides of every shard's border
    return ids


def _embed(sequence_parallel: bool) -> tuple[Tensor, Tensor, int]:
    group = world_group(sequence_parallel)
    layer = VocabParallelEmbedding(builder_for(group))
    y = layer(_ids())
    g = torch.randn(SEQ, BATCH, y.shape[-1], generator=torch.Generator().manual_seed(2))
    (y * sequence_piece(g, group)).sum().backward()
    return y.detach(), layer.weight.grad, group.traffic.calls.total()


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (2, True), (3, False), (4, False), (4, True)])
def test_embedding(size: int, sequence_parallel: bool) -> None:
    """Rows 192 and more of 201 are the last of four shards; with three, 256 padded rows become 258."""
    ranks = run_ranks(_embed, size, sequence_parallel)
    weight = whole_tensors()["embedding.weight"].requires_grad_()
    y = F.embedding(_ids().t(), weight)
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    found = [r[0] for r in ranks]
    assert torch.equal(torch.cat(found) if sequence_parallel else found[0], y.detach())
    grad = torch.cat([r[1] for r in ranks])
    torch.testing.assert_close(grad[:VOCAB], weight.grad)
    assert not grad[VOCAB:].any()


def _logits(kind: str) -> Tensor:
    """[SEQ, BATCH, PADDED]; what stands in the padding must not matter, so it is the largest of all."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(SEQ, BATCH, PADDED, generator=generator)
    if kind == "huge":
        logits *= 1e4
    elif kind == "far":  # exp overflows unless the maximum over all shards is taken off
        logits += 3e4
    elif kind == "lopsided":  # all weight in one shard: the others' exponentials vanish
        logits[..., 70:80] += 500
    elif kind == "constant":
        logits.fill_(-7.0)
    logits[..., VOCAB:] = 1e6
    return logits


def _labels() -> Tensor:
    return _ids().t()


def _loss(kind: str, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor, dict[str, int], dict[str, int]]:
    _VocabParallelCrossEntropy.BLOCK_ELEMENTS = block
    group = world_group(False) if dist.is_initialized() else TensorGroup()
    shards = F.pad(_logits(kind), (0, -PADDED % group.size)).chunk(group.size, -1)
    mine = shards[group.rank].to(dtype).requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, _labels(), VOCAB, group)
    (losses * _token_weights()).sum().backward()
    return losses.detach(), mine.grad, dict(group.traffic.calls), dict(group.traffic.elements)


def _token_weights() -> Tensor:
    weights = torch.rand(SEQ, BATCH, generator=torch.Generator().manual_seed(4))
    weights[2] = 0.0
    return weights


def _losses(cases: list[tuple[str, torch.dtype, int]]) -> list[tuple[Tensor, Tensor, dict[str, int], dict[str, int]]]:
    return [_loss(*case) for case in cases]


KINDS = ["plain", "huge", "far", "lopsided", "constant"]
# Blocks of one row, of a number of rows that does not divide all of them, and of everything.
CASES = [
    (kind, dtype, block) for kind in KINDS for dtype in (torch.float32, torch.bfloat16) for block in (1, 700, 1 << 24)
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_cross_entropy(size: int) -> None:
    """Stable at any scale, fp32 inside, blind to padding, whatever the blocks; against float64 on whole logits."""
    ranks = run_ranks(_losses, size, CASES)
    for index, (kind, dtype, block) in enumerate(CASES):
        what = f"{kind}, {dtype}, blocks of {block}"
        logits = _logits(kind)[..., :VOCAB].to(dtype).double().requires_grad_()
        losses = F.cross_entropy(logits.flatten(0, 1), _labels().flatten(), reduction="none").view(SEQ, BATCH)
        (losses * _token_weights()).sum().backward()
        found = [rank[index] for rank in ranks]
        for loss, *_ in found:
            assert loss.dtype == torch.float32
            # Logits of 3e4 are spaced by 2e-3 in fp32: what is asked for is the rounding of the largest number.
            scale = float(logits.detach().abs().max())
            torch.testing.assert_close(loss.double(), losses.detach(), rtol=1e-6, atol=4e-7 * max(scale, 1.0), msg=what)
            assert torch.equal(loss, found[0][0]), what
        grad = torch.cat([rank_grad for _, rank_grad, *_ in found], -1)
        assert grad.dtype == dtype
        assert not grad[..., VOCAB:].any(), what
        # bf16 rounds the gradient to 8 bits; far logits carry an error of their spacing into the probabilities.
        rtol = 1e-2 if dtype == torch.bfloat16 else 4e-3 if kind in ("far", "huge") else 1e-5
        torch.testing.assert_close(grad[..., :VOCAB].double(), logits.grad, rtol=rtol, atol=1e-6, msg=what)
        calls, elements = found[0][2], found[0][3]
        assert calls == ({} if size == 1 else {"all_reduce": 2}), what
        assert size == 1 or elements == {"all_reduce": 3 * SEQ * BATCH}, what  # nothing of vocabulary size
