"""GlobalBatches: one data-parallel rank's micro-batches, cut from global batches that are the same at every layout.

With cursor c (samples consumed so far), data-parallel degree D and micro-batch size b, the global batch of a step is
samples `[c, c + B)`, and

    micro-batch m of rank d  =  samples  c + (m D + d) b,  ...,  c + (m D + d) b + b - 1        m = 0 ... B / (D b) - 1

so the cursor alone says where training stands: it continues with the next unseen sample at any other D, b or B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mdsp.data.order import SampleOrder
from mdsp.data.tokens import TokenCorpus
from mdsp.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one data-parallel rank reads."""

    tokens: torch.Tensor
    """`[micro_batch, seq]` int64, the inputs."""
    labels: torch.Tensor
    """`[micro_batch, seq]` int64, the token after each input."""
    loss_mask: torch.Tensor
    """`[micro_batch, seq]` float32, 1 where the prediction counts in the loss, else 0."""


class GlobalBatches:
    """Micro-batches by cursor. It holds no position of its own, so there is nothing to restore and nothing runs out.

    Args:
        corpus: The tokens.
        order: The order of their samples.
        global_batch: B, samples of one step over all ranks.
        micro_batch: b, samples of one forward pass of one rank.
        data_parallel_rank: d.
        data_parallel_size: D.
        eod_id: Id of the token that ends a document.
        mask_separators: Leave out of the loss what is predicted from `eod_id`: the next document's first token, which
            nothing before it says anything about.
        repeat: Whether epochs follow one another. Otherwise samples after the first epoch have loss_mask 0, so that an
            evaluation counts every token once however B divides the epoch.

    Raises:
        ConfigError: B is not a multiple of D b, or separators are to be masked and `eod_id` is not known.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        order: SampleOrder,
        global_batch: int,
        micro_batch: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        eod_id: int | None = None,
        mask_separators: bool = False,
        repeat: bool = True,
    ) -> None:
        per_round = micro_batch * data_parallel_size
        if global_batch < 1 or global_batch % per_round:
            below = max(global_batch // per_round, 1) * per_round
            near = sorted({below, below + per_round} if global_batch > per_round else {per_round})
            raise ConfigError(
                f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x data-parallel "
                f"{data_parallel_size} = {per_round}; nearest: {' or '.join(map(str, near))}"
            )
        if mask_separators and eod_id is None:
            raise ConfigError(
                f"data.mask_separators needs the id of the token between documents, and {corpus.name} has no "
                f"description (PREFIX.json) that tells it; rerun `mdsp prepare`, or set mask_separators to false"
            )
        self.corpus = corpus
        self.order = order
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.micro_batches = global_batch // per_round
        self._masked_id = eod_id if mask_separators else None
        self._repeat = repeat

    @property
    def batches_per_epoch(self) -> int:
        """Global batches after which every sample of an epoch has been seen, the last one perhaps partly."""
        return -(-self.order.samples_per_epoch // self.global_batch)

    def sample_indices(self, consumed_samples: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Global samples of this rank's micro-batches, `[micro_batches, micro_batch]`."""
        rounds = np.arange(self.micro_batches, dtype=np.int64)[:, None]
        within = np.arange(self.micro_batch, dtype=np.int64)[None, :]
        return (
            consumed_samples + (rounds * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch + within
        )

    def batch(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step that starts at a cursor; the next cursor is B further."""
        return [self._micro_batch(row) for row in self.sample_indices(consumed_samples)]

    def _micro_batch(self, samples: np.ndarray[tuple[int], np.dtype[np.int64]]) -> MicroBatch:
        found = self.corpus.gather(self.order.positions(samples))
        mask = np.ones((len(samples), self.order.seq_length), dtype=np.float32)
        if self._masked_id is not None:
            mask[found[:, :-1] == self._masked_id] = 0
        if not self._repeat:
            mask[samples >= self.order.samples_per_epoch] = 0
        # Contiguous copies: the pipeline engine sends buffers, not views
        return MicroBatch(
            tokens=torch.from_numpy(found[:, :-1].copy()),
            labels=torch.from_numpy(found[:, 1:].copy()),
            loss_mask=torch.from_numpy(mask),
        )


def evaluation_batches(
    corpus: TokenCorpus,
    seq_length: int,
    global_batch: int,
    micro_batch: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    eod_id: int | None = None,
    mask_separators: bool = False,
) -> GlobalBatches:
    """Batches of held-out text in corpus order, every token counted once: the same samples at every layout.

    Evaluation n reads `batch(0)`, `batch(B)`, ... up to `batches_per_epoch` of them.
    """
    order = SampleOrder(corpus.document_lengths, seq_length, seed=0, shuffle=False, name=corpus.name)
    return GlobalBatches(
        corpus,
        order,
        global_batch,
        micro_batch,
        data_parallel_rank,
        data_parallel_size,
        eod_id,
        mask_separators,
        repeat=False,
    )
