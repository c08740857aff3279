"""Every rule, broken once and kept once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mdsp.config import load
from mdsp.config.load import resolve_run_config
from mdsp.config.read import apply_overrides
from mdsp.config.rules import RULES
from mdsp.errors import ConfigError
from tests.config.files import document


def problems(*overrides: str, world_size: int = 8) -> list[str]:
    """The lines of the error; none when the configuration is legal."""
    values = document()
    apply_overrides(values, overrides)
    try:
        resolve_run_config(values, world_size)
    except ConfigError as error:
        assert error.exit_code == 2
        first, *lines = str(error).split("\n  ")
        assert first == f"configuration: {len(lines)} problem{'s' * (len(lines) > 1)}"
        return lines
    return []


BROKEN: list[tuple[str, tuple[str, ...], str]] = [
    # (check of the rule, overrides that break it, the whole line)
    (
        "_world_size",
        ("mdsp.parallel.pipeline=3",),
        'mdsp.parallel = {"tensor": 2, "pipeline": 3}: tensor x pipeline = 6 must divide the number of ranks 8; '
        "nearest: 2 x 2, 2 x 4, 1 x 2",
    ),
    (
        "_heads",
        ("mdsp.parallel.tensor=8", "mdsp.parallel.pipeline=1"),
        "mdsp.parallel.tensor = 8: must divide mdsp.model.n_heads 4; nearest: 1, 2, 4",
    ),
    (
        "_ffn",
        ("mdsp.model.ffn_size=99",),
        "mdsp.parallel.tensor = 2: must divide mdsp.model.ffn_size 99; nearest: 1",
    ),
    (
        "_layers",
        ("mdsp.model.n_layers=3", "mdsp.parallel.pipeline=4"),
        "mdsp.parallel.pipeline = 4: must be at most mdsp.model.n_layers 3: every stage needs at least one block; "
        "nearest: 1, 2",
    ),
    (
        "_blocks",
        ("mdsp.parallel.blocks_per_stage=[2,2,2]",),
        "mdsp.parallel.blocks_per_stage = [2, 2, 2]: one number per stage is needed: 2, not 3; null balances the "
        "stages by cost",
    ),
    (
        "_blocks",
        ("mdsp.parallel.blocks_per_stage=[6,0]",),
        "mdsp.parallel.blocks_per_stage = [6, 0]: every stage needs at least one block; null balances the stages by "
        "cost",
    ),
    (
        "_blocks",
        ("mdsp.parallel.blocks_per_stage=[3,4]",),
        "mdsp.parallel.blocks_per_stage = [3, 4]: they must add up to mdsp.model.n_layers 6, not 7; null balances the "
        "stages by cost",
    ),
    (
        "_sequence",
        ("mdsp.parallel.sequence_parallel=true", "mdsp.data.seq_length=33"),
        "mdsp.data.seq_length = 33: must be a multiple of mdsp.parallel.tensor 2 under sequence_parallel; "
        "nearest: 32, 34",
    ),
    (
        "_positions",
        ("mdsp.data.seq_length=2048",),
        "mdsp.data.seq_length = 2048: must be at most mdsp.model.max_positions 1024, the size of the learned position "
        "table; nearest: 1024",
    ),
    (
        "_batch",
        ("train_batch_size=18",),
        "train_batch_size = 18: must be train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 4 x "
        "data-parallel degree 2 = 16; set it to 16, or leave one of the three out",
    ),
    (
        "_evaluation",
        ("mdsp.train.eval_interval=10",),
        "mdsp.train.eval_interval = 10: needs mdsp.data.valid, the text to evaluate on; 0 never evaluates",
    ),
    (
        "_recompute_interval",
        ("mdsp.train.recompute_interval=2",),
        'mdsp.train.recompute_interval = 2: counts blocks of mdsp.train.recompute "full", and that is "none"; leave it '
        'out, or recompute "full"',
    ),
    (
        "_warmup",
        ("mdsp.train.schedule.warmup=101",),
        "mdsp.train.schedule.warmup = 101: must be at most the schedule's length of 100 steps; nearest: 100",
    ),
    (
        "_decay",
        ("mdsp.train.schedule.decay=5",),
        'mdsp.train.schedule.decay = 5: is the final decay of kind "wsd", and the kind is "cosine"; leave it out',
    ),
    (
        "_decay",
        ("mdsp.train.schedule.kind=wsd", "mdsp.train.schedule.decay=95", "mdsp.train.schedule.warmup=10"),
        "mdsp.train.schedule.decay = 95: and warmup 10 together must be at most the schedule's length of 100 steps; "
        "nearest: 90",
    ),
    (
        "_checkpoint_dir",
        ("mdsp.checkpoint.interval=10",),
        "mdsp.checkpoint.interval = 10: needs mdsp.checkpoint.dir, where to write them",
    ),
    (
        "_checkpoint_dir",
        ("mdsp.checkpoint.minutes=2.5",),
        "mdsp.checkpoint.minutes = 2.5: needs mdsp.checkpoint.dir, where to write them",
    ),
    (
        "_keep_every",
        ("mdsp.checkpoint.keep_every=100",),
        "mdsp.checkpoint.keep_every = 100: names exceptions from mdsp.checkpoint.keep_last, and that is 0: all "
        "checkpoints stay anyway; leave it out, or set keep_last",
    ),
    (
        "_rollback",
        ("mdsp.train.loss_guard.action=rollback", "mdsp.checkpoint.dir=here"),
        'mdsp.train.loss_guard.action = "rollback": needs checkpoints to return to: mdsp.checkpoint.dir, and '
        'interval or minutes; or "skip"',
    ),
    (
        "_resume",
        ("mdsp.checkpoint.resume=auto",),
        'mdsp.checkpoint.resume = "auto": needs mdsp.checkpoint.dir, where to look for checkpoints',
    ),
    (
        "_resume_word",
        ("mdsp.checkpoint.resume=",),
        'mdsp.checkpoint.resume = "": must be "none", "auto" or the path of a checkpoint',
    ),
    (
        "_paths",
        ("mdsp.checkpoint.dir=",),
        'mdsp.checkpoint.dir = "": is not the name of a file or directory; give another, or leave the key out',
    ),
    (
        "_paths",
        ('mdsp.data.train=["data/a",""]',),
        'mdsp.data.train = ["data/a", ""]: is not the name of a file or directory; give another, or leave the key out',
    ),
    (
        "_zero_stage",
        ("zero_optimization.stage=2",),
        "zero_optimization.stage = 2: every model is a pipeline module, and ZeRO-2 and ZeRO-3 shard gradients that the "
        "pipeline still accumulates; nearest: 1",
    ),
    (
        "_zero_off",
        ("zero_optimization.stage=0",),
        "zero_optimization.stage = 0: with mdsp.parallel.pipeline 2 > 1 computes a wrong gradient norm; nearest: 1",
    ),
    (
        "_zero_off",
        ("zero_optimization.stage=0", "bf16.enabled=true", "mdsp.parallel.pipeline=1"),
        "zero_optimization.stage = 0: with bf16 has no optimizer that accumulates gradients in fp32; nearest: 1",
    ),
    (
        "_two_precisions",
        ("bf16.enabled=true", "fp16.enabled=true"),
        "fp16.enabled = true: bf16.enabled is true as well, and a model computes in one format; drop one",
    ),
    (
        "_bf16_accumulation",
        ("bf16.enabled=true", "data_types.grad_accum_dtype=bf16"),
        'data_types.grad_accum_dtype = "bf16": with bf16 gradients must be accumulated in fp32, or small ones are '
        'lost; nearest: "fp32"',
    ),
    (
        "_fp16_accumulation",
        ("fp16.enabled=true", "data_types.grad_accum_dtype=fp32"),
        'data_types.grad_accum_dtype = "fp32": with fp16 leaves tied weights out of step between stages; leave it out, '
        'or "fp16"',
    ),
    (
        "_fp32_accumulation",
        ("data_types.grad_accum_dtype=bf16",),
        'data_types.grad_accum_dtype = "bf16": with fp32 compute must be fp32; leave it out',
    ),
    (
        "_optimizer",
        ("optimizer.type=Lamb",),
        'optimizer.type = "Lamb": must be an optimizer that is proven in the pipeline; one of "Adam", "AdamW", "SGD"',
    ),
    (
        "_optimizer_params",
        ("optimizer.params.lr=-1",),
        "optimizer.params.lr = -1: must be number > 0",
    ),
    (
        "_optimizer_params",
        ("optimizer.params.betas=[0.9,1]",),
        "optimizer.params.betas.1 = 1: must be number >= 0 and < 1",
    ),
    (
        "_nesterov",
        ("optimizer.type=SGD", "optimizer.params.nesterov=true"),
        "optimizer.params.nesterov = true: needs momentum above 0 and no dampening; set them, or false",
    ),
    (
        "_torch_adam",
        ("optimizer.params.torch_adam=false",),
        "optimizer.params.torch_adam = false: DeepSpeed's own Adam has to be compiled first, and mdsp uses torch's "
        "fused one; nearest: true",
    ),
    (
        "_untested_sgd",
        ("optimizer.type=SGD", "zero_allow_untested_optimizer=false"),
        "zero_allow_untested_optimizer = false: refuses SGD with ZeRO; nearest: true",
    ),
    (
        "_scheduler",
        ("scheduler.type=WarmupLR", "mdsp.train.schedule.warmup=3"),
        'scheduler.type = "WarmupLR": mdsp.train.schedule is set as well, and only one can set the learning rate; '
        "delete one of them",
    ),
    (
        "_timers",
        ("wall_clock_breakdown=true",),
        "wall_clock_breakdown = true: crashes DeepSpeed's pipeline with mdsp.parallel.pipeline 2 > 1; false; "
        "mdsp.monitor.timeline_interval times every instruction",
    ),
    (
        "_profiler",
        ("flops_profiler.enabled=true",),
        "flops_profiler.enabled = true: crashes DeepSpeed's pipeline with mdsp.parallel.pipeline 2 > 1; false; mdsp "
        "logs model and hardware FLOP/s itself",
    ),
    (
        "_seed_layers",
        ("pipeline.seed_layers=true",),
        "pipeline.seed_layers = true: reseeds random numbers from a counter that no checkpoint saves, so a resumed run "
        "would differ; false; mdsp.train.seed sets all random numbers",
    ),
    (
        "_checkpoint_interval",
        ("pipeline.activation_checkpoint_interval=1",),
        "pipeline.activation_checkpoint_interval = 1: is not how mdsp recomputes; 0; use mdsp.train.recompute "
        '"full" and recompute_interval',
    ),
    (
        "_reentrant",
        ("pipeline.use_reentrant=true",),
        "pipeline.use_reentrant = true: reentrant checkpointing fails on the integer token ids of the first stage; "
        "nearest: false",
    ),
    (
        "_pipe_partitioned",
        ("mdsp.parallel.sequence_parallel=true", "pipeline.pipe_partitioned=true"),
        "pipeline.pipe_partitioned = true: under mdsp.parallel.sequence_parallel every tensor rank holds its own "
        "tokens, so nothing is left to divide; nearest: false",
    ),
    (
        "_grad_partitioned",
        ("mdsp.parallel.sequence_parallel=true", "pipeline.grad_partitioned=true"),
        "pipeline.grad_partitioned = true: under mdsp.parallel.sequence_parallel every tensor rank holds its own "
        "tokens, so nothing is left to divide; nearest: false",
    ),
]


@pytest.mark.parametrize(("check", "overrides", "line"), BROKEN)
def test_a_broken_rule_is_one_line(check: str, overrides: tuple[str, ...], line: str) -> None:
    assert problems(*overrides) == [line]


def test_every_rule_is_broken_above() -> None:
    tested = {check for check, _, _ in BROKEN} | {"_version"}
    assert {rule.check.__name__ for rule in RULES} == tested


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("mdsp.parallel.tensor=4", "mdsp.model.n_kv_heads=1"),
        ("mdsp.parallel.tensor=4", "mdsp.model.n_kv_heads=2"),
        ("mdsp.model.vocab_size=50257",),
        ("mdsp.parallel.blocks_per_stage=[5,1]",),
        ("mdsp.parallel.sequence_parallel=true", "pipeline.pipe_partitioned=false"),
        ("mdsp.model.family=llama", "mdsp.data.seq_length=999999"),
        ("mdsp.train.eval_interval=10", "mdsp.data.valid=text"),
        ("mdsp.train.recompute=full", "mdsp.train.recompute_interval=3"),
        ("mdsp.train.schedule.unit=tokens", "mdsp.train.schedule.warmup=1000000"),
        ("mdsp.train.schedule.kind=wsd", "mdsp.train.schedule.decay=90", "mdsp.train.schedule.warmup=10"),
        ("mdsp.checkpoint.interval=10", "mdsp.checkpoint.dir=here", "mdsp.checkpoint.resume=auto"),
        ("mdsp.checkpoint.resume=somewhere",),
        ("mdsp.train.loss_guard.action=rollback", "mdsp.checkpoint.dir=here", "mdsp.checkpoint.minutes=1"),
        ("mdsp.checkpoint.keep_last=2", "mdsp.checkpoint.keep_every=100"),
        ("zero_optimization.stage=0", "mdsp.parallel.pipeline=1"),
        ("bf16.enabled=true", "data_types.grad_accum_dtype=fp32"),
        ("fp16.enabled=true", "data_types.grad_accum_dtype=fp16"),
        ("bf16.enabled=false", "fp16.enabled=false", "data_types.grad_accum_dtype=fp32"),
        ("optimizer.type=sgd", 'optimizer.params={"lr": 1, "momentum": 0.9}'),
        ("scheduler.type=WarmupLR",),
        ("wall_clock_breakdown=true", "flops_profiler.enabled=true", "mdsp.parallel.pipeline=1"),
        ("scheduler=null", "wandb=null", "mdsp.train.schedule.warmup=5"),
    ],
)
def test_legal_combinations(overrides: tuple[str, ...]) -> None:
    assert problems(*overrides) == []


def test_all_problems_come_together() -> None:
    lines = problems("mdsp.parallel.tensor=3", "zero_optimization.stage=3", "mdsp.train.eval_interval=5", world_size=7)
    assert [line.partition(" = ")[0] for line in lines] == [
        "mdsp.parallel",
        "mdsp.parallel.tensor",
        "mdsp.train.eval_interval",
        "zero_optimization.stage",
    ]


@pytest.mark.parametrize(("version", "legal"), [("0.19.8", True), ("0.18.2", False), (None, False)])
def test_proven_deepspeed_versions(monkeypatch: pytest.MonkeyPatch, version: str | None, legal: bool) -> None:
    monkeypatch.setattr(load, "installed_deepspeed", lambda: version)
    lines = problems()
    assert (lines == []) == legal
    if version is not None and not legal:
        assert lines[0].startswith('installed deepspeed = "0.18.2": ')
        assert "pip install deepspeed==0.19.8" in lines[0]
        assert problems("mdsp.train.allow_unproven_deepspeed=true") == []
    if version is None:
        assert "is not installed" in problems("mdsp.train.allow_unproven_deepspeed=true")[0]


def test_rules_are_rows_of_a_table() -> None:
    for rule in RULES:
        assert dataclasses.is_dataclass(rule)
        assert rule.key and rule.statement


@pytest.mark.parametrize("ranks", [0, 10**30])
def test_world_size_out_of_bounds(ranks: int) -> None:
    values: dict[str, Any] = document()
    with pytest.raises(ConfigError, match=f"number of ranks is {ranks}; it must be at "):
        resolve_run_config(values, ranks)


@pytest.mark.parametrize("key", ["mdsp.model.n_layers", "train_batch_size"])
def test_numbers_too_large_to_count_to(key: str) -> None:
    (line,) = problems(f"{key}=1000000000000")
    assert line.startswith(f"{key} = 1000000000000: must be integer > 0 and <= 1")
