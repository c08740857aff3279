"""Logits and gradients of the mdsp model equal those of `transformers`, for every family and shape, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mdsp.checkpoint.hf_map import parameter_pieces
from mdsp.checkpoint.weights import HfWeights
from mdsp.families import family_names
from mdsp.families.tensors import by_parameter
from mdsp.model.layers import SingleProcessGPT
from tests.families.models import CASES, VOCAB, save_model


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def test_every_family_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == set(family_names())


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str, tmp_path: Path) -> None:
    reference = save_model(case, tmp_path)
    weights = HfWeights(tmp_path)
    model = SingleProcessGPT(weights.config, weights)
    ids = torch.randint(2, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    labels = torch.randint(2, VOCAB, (2 * 24,), generator=torch.Generator().manual_seed(4))

    theirs = reference(ids, use_cache=False).logits
    ours = model.eval()(ids)
    assert ours.shape == theirs.shape
    assert _relative(ours, theirs) < 1e-5

    torch.nn.functional.cross_entropy(theirs.reshape(-1, VOCAB), labels).backward()
    torch.nn.functional.cross_entropy(ours.reshape(-1, VOCAB), labels).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    gradients[f"{weights.family.head}.weight"] = reference.get_output_embeddings().weight.grad
    maps = by_parameter(weights.family.tensors(weights.config))

    def reference_gradient(name: str) -> torch.Tensor:
        entry, piece = maps[name]
        return parameter_pieces(gradients[entry.name], entry, piece).materialize()

    for name, parameter in model.parameters_by_entry().items():
        expected = reference_gradient(name)
        got = parameter.grad[: expected.shape[0]]
        assert not parameter.grad[expected.shape[0] :].any()  # vocabulary padding
        # A key bias shifts all scores of a query alike unless positions turn it: its true gradient is zero then, and
        # only rounding is left of it. The query's bias says how large that may be.
        scale = reference_gradient(name.replace("key", "query")) if name.endswith("key.bias") else expected
        assert float((got - expected).norm()) < 1e-5 * float(scale.norm()), name
