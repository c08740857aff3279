"""What the engine pulls from its data iterator: token ids for the first stage, labels and weights for the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mdsp.config.run_config import RunConfig
from mdsp.data.loader import GlobalBatches, MicroBatch, evaluation_batches
from mdsp.data.order import SampleOrder
from mdsp.data.sidecar import find_sidecar
from mdsp.data.tokens import TokenCorpus, check_vocabulary
from mdsp.errors import ConfigError

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine

# How long a file that rank 0 sees may take to appear on another node.
SHARED_FILE_SYSTEM_DELAY_S = 60.0

EngineBatch = tuple[Tensor, tuple[Tensor, Tensor]]


def weighted(micro_batches: Sequence[MicroBatch], total_tokens: float, share: float) -> list[EngineBatch]:
    """(tokens, (labels, weights)) for each micro-batch, weights = loss_mask * share / total_tokens.

    With share = micro-batches per rank * data ranks, the engine's mean over both is the mean over target tokens.
    """
    scale = share / max(total_tokens, 1.0)
    return [(batch.tokens, (batch.labels, batch.loss_mask * scale)) for batch in micro_batches]


class StageBatches:
    """Batches for a stage that loads data. Every rank of its data-parallel group must call it for the same steps."""

    def __init__(self, batches: GlobalBatches, data_group: dist.ProcessGroup, device: torch.device) -> None:
        self.batches = batches
        self._group = data_group
        self._device = device

    def _total(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Target tokens of the global batch: masks differ between data ranks, so they are summed over the group."""
        count = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        total = torch.tensor([count], dtype=torch.int64, device=self._device)
        dist.all_reduce(total, group=self._group)
        return float(total)

    def train(self, consumed_samples: int) -> Iterator[EngineBatch]:
        """The micro-batches of the step that starts at this cursor. Collective over the data-parallel group."""
        found = self.batches.batch(consumed_samples)
        return iter(weighted(found, self._total(found), len(found) * self.batches.data_parallel_size))

    def evaluation(self, count: int) -> Iterator[Iterator[EngineBatch]]:
        """The first `count` global batches, weighted so that the mean of their losses is the mean over all tokens."""
        found = [self.batches.batch(index * self.batches.global_batch) for index in range(count)]
        total = self._total([batch for batches in found for batch in batches])
        for batches in found:
            yield iter(weighted(batches, total, count * len(batches) * self.batches.data_parallel_size))


def open_batches(run: RunConfig, engine: MdspEngine) -> tuple[StageBatches | None, StageBatches | None]:
    """Training and held-out batches of this rank; None on stages that load no data, and None for held-out text that is
    not configured.

    Raises:
        DataError: a dataset is missing, damaged, too short, or has tokens that the model does not have.
    """
    data, layout, seed = run.mdsp.data, run.layout, run.mdsp.train.seed
    if data.train is None:
        raise ConfigError("mdsp.data.train is not set; give the prefix that `mdsp prepare` wrote")
    grid = engine.grid
    here = (grid.get_data_parallel_rank(), layout.data)
    training = _corpus(data.train, run, engine.global_rank == 0)
    held_out = _corpus(data.valid, run, engine.global_rank == 0) if data.valid is not None else None
    facts = find_sidecar(data.train if isinstance(data.train, str) else data.train[0])
    eod = facts.end_of_document_id if facts else None
    order = SampleOrder(training.document_lengths, data.seq_length, seed, name=training.name)
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None, None
    sizes = (layout.global_batch, layout.micro_batch, *here, eod, data.mask_separators)
    group, device = grid.get_data_parallel_group(), torch.device(engine.device)
    train = StageBatches(GlobalBatches(training, order, *sizes), group, device)
    if held_out is None:
        return train, None
    return train, StageBatches(evaluation_batches(held_out, data.seq_length, *sizes), group, device)


def _corpus(prefixes: str | list[str], run: RunConfig, first_rank: bool) -> TokenCorpus:
    # A file that rank 0 does not see is missing; one that it sees may still be on its way to other nodes.
    corpus = TokenCorpus.open(prefixes, wait_seconds=0.0 if first_rank else SHARED_FILE_SYSTEM_DELAY_S)
    if first_rank:  # one rank is enough: without the facts of `mdsp prepare` the check reads all tokens
        check_vocabulary(corpus, run.model.vocab_size)
    return corpus
