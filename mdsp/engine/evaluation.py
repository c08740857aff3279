"""Loss on held-out text through the pipeline engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mdsp.engine.batches import StageBatches

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine


def evaluate(engine: MdspEngine, batches: StageBatches | None, count: int) -> float:
    """Mean loss in nats per token over the first `count` held-out global batches, on every rank. Collective.

    Args:
        engine: the training engine; its batch and sequence sizes are kept, so no buffer has to be reset.
        batches: held-out batches; None on stages that load no data.
        count: number of global batches, agreed by all ranks.
    """
    iterators = batches.evaluation(count) if batches is not None else iter([None] * count)
    losses = [float(engine.eval_batch(iterator, compute_loss=True)) for iterator in iterators]
    return sum(losses) / count
