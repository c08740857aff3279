"""Putting the ranks' pieces together again, and holding them against one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine.ranks import Case, Layout, RankRun, split_dimension, vocabulary_rows
from tests.engine.reference import Reference
from tests.model.hf_models import Tensors

TOLERANCE = 1e-5
"""Largest difference from one process, relative to the norm of the tensor."""


def gather(layout: Layout, fields: Mapping[str, Any], local: Sequence[Tensors], what: str) -> Tensors:
    """Whole tensors from every rank's, averaged over data ranks (gradients; weights are equal there).

    Fails when ranks that hold the same piece (tensor ranks of a replicated parameter, stages of a tied one) differ in
    any bit, or when padding of the vocabulary is not zero.
    """
    pieces: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rank, tensors in enumerate(local):
        _, data, tensor = layout.place(rank)
        for name, value in tensors.items():
            known = pieces.setdefault(name, {}).setdefault((data, tensor), value)
            assert torch.equal(known, value), f"{what} of {name} differs between stages"
    whole: Tensors = {}
    for name, by_place in pieces.items():
        dim = split_dimension(name, fields, layout.tensor)
        per_data = []
        for data in range(layout.data):
            shards = [by_place[data, tensor] for tensor in range(layout.tensor)]
            if dim is None:
                for shard in shards[1:]:
                    assert torch.equal(shards[0], shard), f"{what} of {name} differs between tensor ranks"
            per_data.append(shards[0] if dim is None else torch.cat(shards, dim))
        if what == "weight":
            for other in per_data[1:]:
                assert torch.equal(per_data[0], other), f"weight of {name} differs between data ranks"
        value = torch.stack(per_data).mean(0)
        if name.startswith(("embedding.", "head.")):
            assert len(value) == vocabulary_rows(fields, layout.tensor) * layout.tensor
            assert not value[fields["vocab_size"] :].any(), f"{what} of padding in {name} is not zero"
            value = value[: fields["vocab_size"]]
        whole[name] = value
    return whole


def distance(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """|found - wanted| / |scale|, Euclidean norms in float64."""
    return float((found.double() - wanted.double()).norm() / scale.double().norm())


def _scale_of(name: str, fields: Mapping[str, Any]) -> str:
    """The tensor whose norm the difference of `name` is measured by: itself, but for one kind.

    A bias of keys moves all scores of a query by the same amount, which softmax does not see: where nothing (rotary
    angles, a norm) comes between, its gradient is zero and what is computed is rounding. It is measured by the bias of
    queries, next to which GPT-2 keeps it in one tensor.
    """
    if (
        name.endswith("attention.key.bias")
        and fields["position"] != "rotary"
        and fields.get("qk_norm", "none") == "none"
    ):
        return name.replace("key", "query")
    return name


def check_against(
    reference: Reference, case: Case, fields: Mapping[str, Any], runs: Sequence[RankRun], tolerance: float = TOLERANCE
) -> None:
    """Loss, global norm, every gradient and every weight of every step, to `tolerance`."""
    problems: list[str] = []

    def close(what: str, found: float) -> None:
        if not found <= tolerance:  # also catches NaN
            problems.append(f"{what}: off by {found:.2e}")

    def compare(what: str, step: int, wanted: Tensors, local: Callable[[RankRun], Sequence[Tensors]]) -> None:
        found = gather(case.layout, fields, [local(run)[step] for run in runs], what)
        assert found.keys() == wanted.keys(), f"{case}: {sorted(found.keys() ^ wanted.keys())}"
        for name, value in found.items():
            close(f"step {step}, {what} of {name}", distance(value, wanted[name], wanted[_scale_of(name, fields)]))

    for step, truth in enumerate(reference.steps[: case.steps]):
        for run in runs:
            close(f"step {step}, loss", abs(run.losses[step] - truth.loss) / truth.loss)
            close(f"step {step}, global norm", abs(run.norms[step] - truth.norm) / truth.norm)
        compare("gradient", step, truth.grads, lambda run: run.grads)
        compare("weight", step, truth.weights, lambda run: run.weights)
    assert not problems, f"{case}: {len(problems)} differences, the first:\n" + "\n".join(problems[:12])
