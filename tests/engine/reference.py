"""What one process of `transformers` computes in some clipped optimizer steps: the truth for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.hf_models import SEQ, HfModel, Tensors, hf_logits

STEPS = 5
GLOBAL_BATCH = 10
CLIP = 0.5

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    # Adam divides by |g| + eps: with a tiny eps the rounding of a gradient near zero would become a whole step.
    "AdamW": {"lr": 0.005, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.05},
}


@dataclass(frozen=True)
class Batch:
    """One global batch, each `[GLOBAL_BATCH, SEQ]`."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Step:
    """Loss before an optimizer step, its gradients before clipping and their norm, and the weights after it."""

    loss: float
    norm: float
    grads: Tensors
    weights: Tensors


@dataclass(frozen=True)
class Reference:
    """A training run."""

    initial: Tensors
    """Weights by table name, `[out, in]`, true vocabulary."""
    steps: list[Step]


def global_batch(vocab: int, step: int) -> Batch:
    """Random tokens; the share of masked tokens differs between sequences, so that micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (GLOBAL_BATCH, SEQ)
    tokens, labels = (torch.randint(0, vocab, shape, generator=generator) for _ in range(2))
    labels[0, 0], labels[1, 1] = 0, vocab - 1  # both ends of the vocabulary are hit
    keep = torch.linspace(0.15, 1.0, GLOBAL_BATCH).roll(step).unsqueeze(1)
    return Batch(tokens, labels, (torch.rand(shape, generator=generator) < keep).float())


def masked_loss(logits: Tensor, batch: Batch) -> Tensor:
    """sum(token losses x mask) / sum(mask) over the global batch; logits [batch, seq, vocabulary]."""
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return (losses * batch.mask.flatten()).sum() / batch.mask.sum()


def reference_run(model: HfModel, optimizer: str, steps: int = STEPS) -> Reference:
    """The `transformers` model trained by torch alone: gradients clipped to `CLIP`, matrices decayed, not vectors."""
    hf = model.build()
    named = dict(hf.named_parameters())
    settings = dict(OPTIMIZERS[optimizer])
    decay = settings.pop("weight_decay")
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optim: torch.optim.Optimizer = getattr(torch.optim, optimizer)(groups, **settings)

    def by_table(tensors: Mapping[str, Tensor]) -> Tensors:
        return {name: tensor.detach().clone() for name, tensor in model.to_table(tensors).items()}

    initial, found = by_table(named), []
    for step in range(steps):
        batch = global_batch(model.fields["vocab_size"], step)
        optim.zero_grad()
        loss = masked_loss(hf_logits(hf, batch.tokens), batch)
        loss.backward()
        grads = by_table({name: parameter.grad for name, parameter in named.items() if parameter.grad is not None})
        norm = float(torch.nn.utils.clip_grad_norm_(list(named.values()), CLIP))
        assert norm > CLIP, f"{model.name}: clipping is not active at step {step} (norm {norm})"
        optim.step()
        found.append(Step(float(loss.detach()), norm, grads, by_table(named)))
    return Reference(initial, found)
