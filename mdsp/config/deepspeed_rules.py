"""Rules about DeepSpeed: combinations that fail late, hang, or silently compute something else (seen with 0.19.8)."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from mdsp.config.deepspeed_schema import AdamParams, SgdParams
from mdsp.config.keys import problems_of
from mdsp.config.problems import MISSING, Problem
from mdsp.config.view import Rule, View

PROVEN_DEEPSPEED = ("0.19.8",)
"""Versions that the numbers were proven on; others sum where they should average (0.18.2) or scale twice (0.19.2)."""

OPTIMIZERS: dict[str, tuple[str, type[BaseModel]]] = {
    "adam": ("Adam", AdamParams),
    "adamw": ("AdamW", AdamParams),
    "sgd": ("SGD", SgdParams),
}
"""Lower-case `optimizer.type` -> (the name as DeepSpeed and torch spell it, the schema of its arguments)."""


def _version(view: View) -> Problem | None:
    version = view.deepspeed_version
    if version in PROVEN_DEEPSPEED or (version is not None and view.mdsp.train.allow_unproven_deepspeed):
        return None
    proven = ", ".join(PROVEN_DEEPSPEED)
    if version is None:
        return Problem("deepspeed", MISSING, "is not installed", f"pip install deepspeed=={proven}")
    rule = f"mdsp's numbers are proven on DeepSpeed {proven} only; other versions scale gradients differently"
    way_out = f"pip install deepspeed=={PROVEN_DEEPSPEED[-1]}, or set mdsp.train.allow_unproven_deepspeed to true"
    return Problem("installed deepspeed", version, rule, way_out)


def _zero_stage(view: View) -> Problem | None:
    stage = view.file.zero_optimization.stage
    if stage < 2:
        return None
    rule = "every model is a pipeline module, and ZeRO-2 and ZeRO-3 shard gradients that the pipeline still accumulates"
    return Problem("zero_optimization.stage", stage, rule, "nearest: 1")


def _zero_off(view: View) -> Problem | None:
    if view.file.zero_optimization.stage != 0:
        return None
    if view.precision == "bf16":
        rule = "with bf16 has no optimizer that accumulates gradients in fp32"
    elif view.pipeline > 1:
        rule = f"with mdsp.parallel.pipeline {view.pipeline} > 1 computes a wrong gradient norm"
    else:
        return None
    return Problem("zero_optimization.stage", 0, rule, "nearest: 1")


def _two_precisions(view: View) -> Problem | None:
    if not (view.file.bf16.enabled and view.file.fp16.enabled):
        return None
    return Problem("fp16.enabled", True, "bf16.enabled is true as well, and a model computes in one format", "drop one")


def _bf16_accumulation(view: View) -> Problem | None:
    chosen = view.file.data_types.grad_accum_dtype
    if not view.file.bf16.enabled or chosen in (None, "fp32"):
        return None
    rule = "with bf16 gradients must be accumulated in fp32, or small ones are lost"
    return Problem("data_types.grad_accum_dtype", chosen, rule, 'nearest: "fp32"')


def _fp16_accumulation(view: View) -> Problem | None:
    chosen = view.file.data_types.grad_accum_dtype
    if not view.file.fp16.enabled or view.file.bf16.enabled or chosen in (None, "fp16"):
        return None
    rule = "with fp16 leaves tied weights out of step between stages"
    return Problem("data_types.grad_accum_dtype", chosen, rule, 'leave it out, or "fp16"')


def _fp32_accumulation(view: View) -> Problem | None:
    chosen = view.file.data_types.grad_accum_dtype
    if view.precision != "fp32" or chosen in (None, "fp32"):
        return None
    return Problem("data_types.grad_accum_dtype", chosen, "with fp32 compute must be fp32", "leave it out")


def _timers(view: View) -> Problem | None:
    if not view.file.wall_clock_breakdown or view.pipeline == 1:
        return None
    rule = f"crashes DeepSpeed's pipeline with mdsp.parallel.pipeline {view.pipeline} > 1"
    return Problem("wall_clock_breakdown", True, rule, "false; mdsp.monitor.timeline_interval times every instruction")


def _profiler(view: View) -> Problem | None:
    if not view.file.flops_profiler.enabled or view.pipeline == 1:
        return None
    rule = f"crashes DeepSpeed's pipeline with mdsp.parallel.pipeline {view.pipeline} > 1"
    return Problem("flops_profiler.enabled", True, rule, "false; mdsp logs model and hardware FLOP/s itself")


def _scheduler(view: View) -> Problem | None:
    scheduler = view.file.scheduler
    if scheduler is None or "schedule" not in view.mdsp.train.model_fields_set:
        return None
    rule = "mdsp.train.schedule is set as well, and only one can set the learning rate"
    return Problem("scheduler.type", scheduler.type, rule, "delete one of them")


def _seed_layers(view: View) -> Problem | None:
    if not view.file.pipeline.seed_layers:
        return None
    rule = "reseeds random numbers from a counter that no checkpoint saves, so a resumed run would differ"
    return Problem("pipeline.seed_layers", True, rule, "false; mdsp.train.seed sets all random numbers")


def _checkpoint_interval(view: View) -> Problem | None:
    interval = view.file.pipeline.activation_checkpoint_interval
    if not interval:
        return None
    way_out = '0; use mdsp.train.recompute "full" and recompute_interval'
    return Problem("pipeline.activation_checkpoint_interval", interval, "is not how mdsp recomputes", way_out)


def _reentrant(view: View) -> Problem | None:
    if not view.file.pipeline.use_reentrant:
        return None
    rule = "reentrant checkpointing fails on the integer token ids of the first stage"
    return Problem("pipeline.use_reentrant", True, rule, "nearest: false")


def _partitioned(key: str, chosen: bool | None, view: View) -> Problem | None:
    if not chosen or not view.mdsp.parallel.sequence_parallel:
        return None
    rule = "under mdsp.parallel.sequence_parallel every tensor rank holds its own tokens, so nothing is left to divide"
    return Problem(key, True, rule, "nearest: false")


def _pipe_partitioned(view: View) -> Problem | None:
    return _partitioned("pipeline.pipe_partitioned", view.file.pipeline.pipe_partitioned, view)


def _grad_partitioned(view: View) -> Problem | None:
    return _partitioned("pipeline.grad_partitioned", view.file.pipeline.grad_partitioned, view)


def _optimizer(view: View) -> Problem | None:
    kind = view.file.optimizer.type
    if kind.lower() in OPTIMIZERS:
        return None
    known = ", ".join(f'"{name}"' for name, _ in OPTIMIZERS.values())
    return Problem("optimizer.type", kind, "must be an optimizer that is proven in the pipeline", f"one of {known}")


def _optimizer_params(view: View) -> Problem | None:
    kind, params = view.file.optimizer.type.lower(), view.file.optimizer.params
    if kind not in OPTIMIZERS:
        return None
    schema = OPTIMIZERS[kind][1]
    try:
        schema.model_validate(params, strict=True)
    except ValidationError as error:
        return problems_of(error, schema, "optimizer.params.")[0]
    return None


def _nesterov(view: View) -> Problem | None:
    params = view.file.optimizer.params
    if view.file.optimizer.type.lower() != "sgd" or params.get("nesterov") is not True:
        return None
    if params.get("momentum") and not params.get("dampening"):
        return None
    return Problem("optimizer.params.nesterov", True, "needs momentum above 0 and no dampening", "set them, or false")


def _torch_adam(view: View) -> Problem | None:
    if view.file.optimizer.params.get("torch_adam") is not False:
        return None
    rule = "DeepSpeed's own Adam has to be compiled first, and mdsp uses torch's fused one"
    return Problem("optimizer.params.torch_adam", False, rule, "nearest: true")


def _untested_sgd(view: View) -> Problem | None:
    allowed = view.file.zero_allow_untested_optimizer
    if allowed is not False or view.file.optimizer.type.lower() != "sgd":
        return None
    return Problem("zero_allow_untested_optimizer", False, "refuses SGD with ZeRO", "nearest: true")


RULES: tuple[Rule, ...] = (
    Rule("deepspeed", f"the installed version is {' or '.join(PROVEN_DEEPSPEED)}", _version),
    Rule("zero_optimization.stage", "0 or 1", _zero_stage),
    Rule("zero_optimization.stage", "1 with bf16, and 1 with more than one stage", _zero_off),
    Rule("fp16.enabled", "not together with bf16", _two_precisions),
    Rule("data_types.grad_accum_dtype", "fp32 with bf16", _bf16_accumulation),
    Rule("data_types.grad_accum_dtype", "not fp32 with fp16", _fp16_accumulation),
    Rule("data_types.grad_accum_dtype", "fp32 with fp32", _fp32_accumulation),
    Rule("optimizer.type", "AdamW, Adam or SGD", _optimizer),
    Rule("optimizer.params", "arguments of that optimizer, with a learning rate", _optimizer_params),
    Rule("optimizer.params.nesterov", "needs momentum above 0 and no dampening", _nesterov),
    Rule("optimizer.params.torch_adam", "true", _torch_adam),
    Rule("zero_allow_untested_optimizer", "true with SGD", _untested_sgd),
    Rule("scheduler", "not together with mdsp.train.schedule", _scheduler),
    Rule("wall_clock_breakdown", "false with more than one stage", _timers),
    Rule("flops_profiler.enabled", "false with more than one stage", _profiler),
    Rule("pipeline.seed_layers", "false", _seed_layers),
    Rule("pipeline.activation_checkpoint_interval", "0", _checkpoint_interval),
    Rule("pipeline.use_reentrant", "false", _reentrant),
    Rule("pipeline.pipe_partitioned", "not under sequence_parallel", _pipe_partitioned),
    Rule("pipeline.grad_partitioned", "not under sequence_parallel", _grad_partitioned),
)
"""Reported after the rules about the layout, in this order."""
