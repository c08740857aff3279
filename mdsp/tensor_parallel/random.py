"""Dropout whose masks are a function of where and when they are used, so that nothing has to be saved or restored.

Every dropout seeds the default generator from (seed, step, micro-batch, data rank, layer, site) just before it draws,
and from the tensor rank too where the activation is split. Masks are then equal on the ranks of a tensor group where
activations are replicated, different everywhere else, the same when a block is recomputed, and the same after a resume.
Nothing else in training draws from the default generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """Which micro-batch is being computed. Captured by recomputation, which runs at a later moment."""

    step: int = 0
    micro_batch: int = 0


class DropoutStreams:
    """The random streams of one rank."""

    def __init__(self, seed: int = 0, data_rank: int = 0, tensor_rank: int = 0) -> None:
        self.seed = seed
        self.data_rank = data_rank
        self.tensor_rank = tensor_rank
        self.moment = Moment()

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """Draw as of another moment."""
        current, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = current

    def prepare(self, site: str, split: bool) -> None:
        """Seed the default generator for one drawing at `site` (unique in the model).

        `split`: the activation is this tensor rank's own piece (heads, or a slice of the sequence).
        """
        rank = self.tensor_rank if split else -1
        key = f"{self.seed}/{self.moment.step}/{self.moment.micro_batch}/{self.data_rank}/{rank}/{site}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)

    def dropout(self, x: Tensor, probability: float, training: bool, site: str, split: bool) -> Tensor:
        """x with each element zeroed with `probability` and the others scaled by 1 / (1 - probability)."""
        if not training or probability == 0.0:
            return x
        self.prepare(site, split)
        return F.dropout(x, probability, training=True)
