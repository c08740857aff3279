"""The one table of rules about combinations: what goes together, checked before anything is built.

A rule looks at a `View` of the configuration and returns its problem, or None. Rules about DeepSpeed itself are in
`deepspeed_rules.py`; `RULES` holds them all.
"""

from __future__ import annotations

from mdsp.config import deepspeed_rules
from mdsp.config.batch import Batch, resolve_batch
from mdsp.config.problems import Problem, divisors, nearest
from mdsp.config.view import Rule, View


def _of_model(view: View, tensor: int) -> list[int]:
    """Tensor-parallel degrees that this model allows."""
    model = view.model
    return [d for d in divisors(model.n_heads) if model.ffn_size % d == 0] if model is not None else [tensor]


def _world_size(view: View) -> Problem | None:
    tensor, pipeline, world = view.tensor, view.pipeline, view.world_size
    if world % (tensor * pipeline) == 0:
        return None
    most_stages = view.model.n_layers if view.model is not None else world
    legal = [
        (t, p)
        for t in divisors(world)
        if t in _of_model(view, tensor)
        for p in divisors(world // t)
        if p <= most_stages
    ]
    legal = sorted(legal, key=lambda pair: (abs(pair[0] - tensor) + abs(pair[1] - pipeline), pair))[:3]
    rule = f"tensor x pipeline = {tensor * pipeline} must divide the number of ranks {world}"
    way_out = "nearest: " + ", ".join(f"{t} x {p}" for t, p in legal) if legal else ""
    return Problem("mdsp.parallel", {"tensor": tensor, "pipeline": pipeline}, rule, way_out)


def _heads(view: View) -> Problem | None:
    if view.model is None or view.model.n_heads % view.tensor == 0:
        return None
    rule = f"must divide mdsp.model.n_heads {view.model.n_heads}"
    return Problem("mdsp.parallel.tensor", view.tensor, rule, nearest(_of_model(view, view.tensor), view.tensor))


def _ffn(view: View) -> Problem | None:
    if view.model is None or view.model.ffn_size % view.tensor == 0:
        return None
    rule = f"must divide mdsp.model.ffn_size {view.model.ffn_size}"
    return Problem("mdsp.parallel.tensor", view.tensor, rule, nearest(_of_model(view, view.tensor), view.tensor))


def _sequence(view: View) -> Problem | None:
    seq_length = view.mdsp.data.seq_length
    if not view.mdsp.parallel.sequence_parallel or seq_length % view.tensor == 0:
        return None
    below = seq_length // view.tensor * view.tensor
    legal = nearest([n for n in (below, below + view.tensor) if n > 0], seq_length)
    rule = f"must be a multiple of mdsp.parallel.tensor {view.tensor} under sequence_parallel"
    return Problem("mdsp.data.seq_length", seq_length, rule, legal)


def _positions(view: View) -> Problem | None:
    model, seq_length = view.model, view.mdsp.data.seq_length
    if model is None or model.position != "learned" or seq_length <= model.max_positions:
        return None
    rule = f"must be at most mdsp.model.max_positions {model.max_positions}, the size of the learned position table"
    return Problem("mdsp.data.seq_length", seq_length, rule, f"nearest: {model.max_positions}")


def _layers(view: View) -> Problem | None:
    if view.model is None or view.pipeline <= view.model.n_layers:
        return None
    n_layers = view.model.n_layers
    rule = f"must be at most mdsp.model.n_layers {n_layers}: every stage needs at least one block"
    legal = [d for d in divisors(view.world_size) if d <= n_layers]
    return Problem("mdsp.parallel.pipeline", view.pipeline, rule, nearest(legal, view.pipeline))


def _blocks(view: View) -> Problem | None:
    blocks, model = view.mdsp.parallel.blocks_per_stage, view.model
    if blocks is None:
        return None
    wrong = []
    if len(blocks) != view.pipeline:
        wrong.append(f"one number per stage is needed: {view.pipeline}, not {len(blocks)}")
    if any(count < 1 for count in blocks):
        wrong.append("every stage needs at least one block")
    if model is not None and sum(blocks) != model.n_layers:
        wrong.append(f"they must add up to mdsp.model.n_layers {model.n_layers}, not {sum(blocks)}")
    way_out = "null balances the stages by cost"
    return Problem("mdsp.parallel.blocks_per_stage", blocks, ", and ".join(wrong), way_out) if wrong else None


def batch_of(view: View) -> Batch | Problem | None:
    """The resolved batch; None where the degrees do not fit the world and so there is no data-parallel degree."""
    if view.data is None:
        return None
    file = view.file
    return resolve_batch(
        file.train_batch_size, file.train_micro_batch_size_per_gpu, file.gradient_accumulation_steps, view.data
    )


def _batch(view: View) -> Problem | None:
    found = batch_of(view)
    return found if isinstance(found, Problem) else None


def _evaluation(view: View) -> Problem | None:
    if not view.mdsp.train.eval_interval or view.mdsp.data.valid is not None:
        return None
    rule = "needs mdsp.data.valid, the text to evaluate on"
    return Problem("mdsp.train.eval_interval", view.mdsp.train.eval_interval, rule, "0 never evaluates")


def _checkpoint_dir(view: View) -> Problem | None:
    checkpoint = view.mdsp.checkpoint
    if checkpoint.dir is not None:
        return None
    for name in ("interval", "minutes"):
        value = getattr(checkpoint, name)
        if value:
            return Problem(f"mdsp.checkpoint.{name}", value, "needs mdsp.checkpoint.dir, where to write them")
    return None


def _keep_every(view: View) -> Problem | None:
    checkpoint = view.mdsp.checkpoint
    if not checkpoint.keep_every or checkpoint.keep_last:
        return None
    rule = "names exceptions from mdsp.checkpoint.keep_last, and that is 0: all checkpoints stay anyway"
    return Problem("mdsp.checkpoint.keep_every", checkpoint.keep_every, rule, "leave it out, or set keep_last")


def _rollback(view: View) -> Problem | None:
    checkpoint, action = view.mdsp.checkpoint, view.mdsp.train.loss_guard.action
    if action != "rollback" or (checkpoint.dir is not None and (checkpoint.interval or checkpoint.minutes)):
        return None
    rule = "needs checkpoints to return to: mdsp.checkpoint.dir, and interval or minutes"
    return Problem("mdsp.train.loss_guard.action", action, rule, 'or "skip"')


def _resume(view: View) -> Problem | None:
    checkpoint = view.mdsp.checkpoint
    if checkpoint.resume != "auto" or checkpoint.dir is not None:
        return None
    return Problem("mdsp.checkpoint.resume", "auto", "needs mdsp.checkpoint.dir, where to look for checkpoints")


def _resume_word(view: View) -> Problem | None:
    resume = view.mdsp.checkpoint.resume
    if resume != "":
        return None
    return Problem("mdsp.checkpoint.resume", resume, 'must be "none", "auto" or the path of a checkpoint')


def _recompute_interval(view: View) -> Problem | None:
    train = view.mdsp.train
    if train.recompute_interval == 1 or train.recompute == "full":
        return None
    rule = f'counts blocks of mdsp.train.recompute "full", and that is "{train.recompute}"'
    return Problem("mdsp.train.recompute_interval", train.recompute_interval, rule, 'leave it out, or recompute "full"')


def _warmup(view: View) -> Problem | None:
    schedule, steps = view.mdsp.train.schedule, view.mdsp.train.steps
    total = schedule.total if schedule.total is not None else (steps if schedule.unit == "steps" else None)
    if schedule.kind == "constant" or total is None or schedule.warmup <= total:
        return None
    rule = f"must be at most the schedule's length of {total} {schedule.unit}"
    return Problem("mdsp.train.schedule.warmup", schedule.warmup, rule, f"nearest: {total}")


def _decay(view: View) -> Problem | None:
    schedule, steps = view.mdsp.train.schedule, view.mdsp.train.steps
    if schedule.decay is None:
        return None
    if schedule.kind != "wsd":
        rule = f'is the final decay of kind "wsd", and the kind is "{schedule.kind}"'
        return Problem("mdsp.train.schedule.decay", schedule.decay, rule, "leave it out")
    total = schedule.total if schedule.total is not None else (steps if schedule.unit == "steps" else None)
    if total is None or schedule.warmup + schedule.decay <= total:
        return None
    rule = f"and warmup {schedule.warmup} together must be at most the schedule's length of {total} {schedule.unit}"
    longest = total - schedule.warmup
    return Problem(
        "mdsp.train.schedule.decay", schedule.decay, rule, f"nearest: {longest}" if longest > 0 else "shorten warmup"
    )


def _paths(view: View) -> Problem | None:
    data = view.mdsp.data
    paths: dict[str, str | list[str] | None] = {
        "mdsp.data.train": data.train,
        "mdsp.data.valid": data.valid,
        "mdsp.data.tokenizer": data.tokenizer,
        "mdsp.checkpoint.dir": view.mdsp.checkpoint.dir,
        "mdsp.monitor.dir": view.mdsp.monitor.dir,
    }
    for key, value in paths.items():
        if value == [] or any(
            not path or "\0" in path for path in ([value] if isinstance(value, str) else value or [])
        ):
            way_out = "give another, or leave the key out"
            return Problem(key, value, "is not the name of a file or directory", way_out)
    return None


RULES: tuple[Rule, ...] = (
    Rule("mdsp.parallel", "tensor x pipeline divides the number of ranks", _world_size),
    Rule("mdsp.parallel.tensor", "divides n_heads (key/value heads are replicated where it does not divide)", _heads),
    Rule("mdsp.parallel.tensor", "divides ffn_size", _ffn),
    Rule("mdsp.parallel.pipeline", "at most n_layers", _layers),
    Rule("mdsp.parallel.blocks_per_stage", "one number per stage, each at least 1, adding up to n_layers", _blocks),
    Rule("mdsp.data.seq_length", "a multiple of tensor under sequence_parallel", _sequence),
    Rule("mdsp.data.seq_length", "at most max_positions where positions are learned", _positions),
    Rule("train_batch_size", "micro-batch x accumulation steps x data-parallel degree", _batch),
    Rule("mdsp.train.eval_interval", "needs mdsp.data.valid", _evaluation),
    Rule("mdsp.train.recompute_interval", 'other than 1 needs recompute "full"', _recompute_interval),
    Rule("mdsp.train.schedule.warmup", "at most the length of the schedule", _warmup),
    Rule("mdsp.train.schedule.decay", 'for kind "wsd" only; with warmup at most the length of the schedule', _decay),
    Rule("mdsp.train.loss_guard.action", '"rollback" needs mdsp.checkpoint.dir, and interval or minutes', _rollback),
    Rule("mdsp.checkpoint.interval", "needs mdsp.checkpoint.dir; so does minutes", _checkpoint_dir),
    Rule("mdsp.checkpoint.keep_every", "needs mdsp.checkpoint.keep_last", _keep_every),
    Rule("mdsp.checkpoint.resume", '"auto" needs mdsp.checkpoint.dir', _resume),
    Rule("mdsp.checkpoint.resume", "is not empty", _resume_word),
    Rule("mdsp.data", "its paths, and those of mdsp.checkpoint and mdsp.monitor, are not empty", _paths),
    *deepspeed_rules.RULES,
)
"""All rules. Every one that is broken is reported, in this order."""


def broken(view: View) -> list[Problem]:
    """The problems of all broken rules."""
    return [problem for rule in RULES if (problem := rule.check(view)) is not None]
