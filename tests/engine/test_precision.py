"""bf16 with ZeRO-1 follows the loss curve of fp32, and tied and replicated weights do not drift apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mdsp.engine.build import build_engine
from tests.engine.compare import gather
from tests.engine.ranks import Case, Chunks, Layout, local_weights, micro_batches, own_groups
from tests.engine.reference import global_batch
from tests.harness import run_ranks
from tests.model.hf_models import Tensors, gpt2

STEPS = 20
MODEL = gpt2("gpt2")
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
OPTIMIZER: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}}}


def _curve(
    case: Case, initial: Tensors, steps: int = STEPS
) -> tuple[list[float], list[float], Tensors, str, set[torch.dtype]]:
    """Losses and norms on two batches in turn, the last weights, and what the engine trained with."""
    with own_groups():
        engine = build_engine(case.run_config(MODEL.fields), Chunks(initial, MODEL.fields))
        _, data_rank, _ = case.layout.place(dist.get_rank())
        losses, norms = [], []
        for step in range(steps):
            batch = global_batch(MODEL.fields["vocab_size"], step % 2)
            losses.append(
                float(engine.train_batch(micro_batches(batch, case.micro_batches, case.layout.data, data_rank)))
            )
            norms.append(float(engine.get_global_grad_norm()))
        kinds = {p._hp_grad.dtype for p in engine.module.parameters() if hasattr(p, "_hp_grad")}
        kinds |= {p.dtype for p in engine.module.parameters()}
        result = losses, norms, local_weights(engine), type(engine.optimizer).__name__, kinds
        engine.destroy()
    return result


def test_bf16_follows_fp32() -> None:
    """TP2 x PP2 x DP2, 20 steps: every loss within bf16's machine epsilon (2^-7, relative) of fp32's on one process."""
    initial = {name: p.detach() for name, p in MODEL.to_table(dict(MODEL.build().named_parameters())).items()}
    single = run_ranks(_curve, 1, Case("gpt2", Layout(), settings=OPTIMIZER), initial)[0]
    layout = Layout(2, 2, 2)
    narrow = run_ranks(_curve, 8, Case("gpt2", layout, settings={**OPTIMIZER, **BF16}), initial)
    assert narrow[0][3] == "BF16_Optimizer"
    assert narrow[0][4] == {torch.bfloat16, torch.float32}  # weights in bf16, gradients accumulated in fp32
    fp32 = single[0]
    assert fp32[-1] < 0.6 * fp32[1]  # there is something to follow
    for rank in range(8):
        for step, wanted in enumerate(fp32):
            assert abs(narrow[rank][0][step] - wanted) < 2**-7 * wanted, f"step {step}: {narrow[rank][0][step]}"
    # Replicas (data ranks, tensor ranks, the tied head) are equal to the bit; `gather` checks it.
    gather(layout, MODEL.fields, [run[2] for run in narrow], "weight")


def test_bf16_with_sequence_parallelism() -> None:
    """Partial gradients are summed where BF16_Optimizer keeps them: the curve is the one without, to rounding."""
    initial = {name: p.detach() for name, p in MODEL.to_table(dict(MODEL.build().named_parameters())).items()}
    cases = [Case("gpt2", Layout(2, 2, 1), on, settings={**OPTIMIZER, **BF16}) for on in (False, True)]
    without, with_it = (run_ranks(_curve, 4, case, initial, 8) for case in cases)
    for step in range(8):
        assert abs(without[0][0][step] / with_it[0][0][step] - 1) < 2**-7, f"step {step}"
        assert abs(without[0][1][step] / with_it[0][1][step] - 1) < 2**-4, f"norm at step {step}"
    gather(Layout(2, 2, 1), MODEL.fields, [run[2] for run in with_it], "weight")
