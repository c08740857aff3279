"""Training, from the JSON file to the last checkpoint, one rank's view of it.

    deepspeed --num_accelerators 8 --module mdsp.train --deepspeed_config FILE [--set mdsp.parallel.tensor=2 ...]

torch is imported only after the configuration is known to be legal.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mdsp.config.load import RunConfig, load_run_config
from mdsp.errors import MdspError
from mdsp.learning_rate import learning_rate_factor
from mdsp.rank_output import Place, RankOutput, log_path, report_once
from mdsp.supervisor import Say, Supervisor
from mdsp.topology import Topology

if TYPE_CHECKING:
    from mdsp.checkpoint.training import Counters, Found
    from mdsp.engine.engine import MdspEngine
    from mdsp.metrics.training_view import TrainingView


def main(argv: Sequence[str] | None = None) -> int:
    """What the launcher runs on every rank; returns the exit code."""
    arguments = _arguments(argv)
    place = _place()
    try:
        run = load_run_config(arguments.deepspeed_config, arguments.set, place.world_size)
    except MdspError as error:
        return report_once(str(error), error.exit_code, place.rank, sys.stderr)
    log = log_path(Path(run.mdsp.monitor.dir), place.rank)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        message = f"mdsp.monitor.dir = {run.mdsp.monitor.dir}: {log} cannot be written ({error.strerror}); give another"
        return report_once(message, 1, place.rank, sys.stderr)
    return Supervisor(place.rank, log.parent, log, sys.stderr).run(partial(_rank, run, place))


def _rank(run: RunConfig, place: Place, say: Say) -> int:
    """The process that trains; `say` reaches its supervisor."""
    output = RankOutput(Path(run.mdsp.monitor.dir), place.rank)
    try:
        train(run, place, output, say)
    except (Exception, KeyboardInterrupt) as error:
        message, certain, code = output.failure(error)
        say(message, certain)
        return code
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mdsp.train", description="Train a GPT; run by the deepspeed launcher.")
    parser.add_argument("--deepspeed_config", type=Path, required=True, metavar="FILE", help="the JSON configuration")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of it")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args(argv)


def _place() -> Place:
    """This process's place in the job; alone when no launcher started it."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    world_size = int(os.environ["WORLD_SIZE"])
    # The deepspeed launcher says LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE.
    per_node = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    return Place(int(os.environ["RANK"]), world_size, int(os.environ["LOCAL_RANK"]), per_node)


def train(run: RunConfig, place: Place, output: RankOutput, say: Say) -> None:
    """The whole job, from joining it to its last checkpoint. Raises MdspError for what the user can mend."""
    from mdsp.checkpoint.schedule import Checkpoints
    from mdsp.checkpoint.training import Counters, find_checkpoint, load_training_checkpoint
    from mdsp.engine.batches import open_batches
    from mdsp.engine.build import build_engine, weight_source
    from mdsp.engine.distributed import join_job, leave_job
    from mdsp.engine.evaluation import evaluate
    from mdsp.engine.loss_guard import LossGuard
    from mdsp.engine.watchdog import watch
    from mdsp.metrics.telemetry import Telemetry
    from mdsp.metrics.training_view import TrainingView
    from mdsp.plan.prediction import StepPrediction

    # Join the job, build this rank's piece of the model, and continue where an earlier run stopped.
    settings = run.mdsp.train
    view = TrainingView(run, output.terminal, enabled=place.rank == 0)
    warn_of_spanning_groups(run, place, view)
    join_job(place, settings.communication_timeout)
    directory = Path(run.mdsp.checkpoint.dir) if run.mdsp.checkpoint.dir else None
    found = find_checkpoint(directory, run.mdsp.checkpoint.resume)
    run = open_chart(run, place, found)
    engine = build_engine(run, weight_source(run))
    counters = Counters() if found is None else load_training_checkpoint(engine, run, found)
    counters = replace(counters, wandb_run_id=chart_id(run, place))
    batches, held_out = open_batches(run, engine)
    telemetry = Telemetry(run, engine)
    predicted = StepPrediction(run, telemetry.peak_source, telemetry.peak, place.ranks_per_node)

    def note(text: str) -> None:
        view.note(text)
        telemetry.note(text)

    engine.loss_guard = guard = LossGuard(settings.loss_guard, settings.max_bad_steps, counters)
    checkpoints = Checkpoints(engine, run, directory, note)
    watchdog = watch(engine, run, place.rank, say)
    for reason in found.passed_over if found else ():
        note(f"passed over: {reason}")
    if found:
        note(f"continuing from {found.path}, after step {counters.step}")
    view.begin(counters)
    note(predicted.before())
    if counters.step >= settings.steps:
        note(f"nothing is left to do: mdsp.train.steps is {settings.steps}, and {counters.step} are done")

    while counters.step < settings.steps:
        lr = set_learning_rate(run, engine, counters)
        telemetry.start_step(counters.step + 1, checkpoints.stall_s)
        cursor = counters.next_samples(run.layout.global_batch)
        data = batches.train(cursor) if batches else None
        telemetry.data_ready()
        watchdog.begin_step(counters.step + 1)
        loss = float(engine.train_batch(data))
        watchdog.end_step()
        counters, verdict = guard.after_step(advance(run, counters, cursor), loss, engine.was_step_applied())
        record = telemetry.finish_step(counters, loss, lr)
        predicted.add(record.step_s)
        if verdict.reason:
            note(f"warning: step {counters.step} is left out: {verdict.reason}")
        if verdict.roll_back:
            telemetry.write(record)
            counters = checkpoints.roll_back(guard, counters, cursor)
            continue

        last = counters.step == settings.steps
        if due(settings.eval_interval, counters.step, last):
            eval_loss = evaluate(engine, held_out, settings.eval_batches)
            record = replace(record, eval_loss=eval_loss)
            counters = replace(counters, best_eval_loss=min(eval_loss, counters.best_eval_loss or math.inf))
        telemetry.write(record)
        view.step(record)
        stop = checkpoints.after_step(counters, last)
        if stop:
            note(stop)
            break

    checkpoints.close()
    view.end()
    note(predicted.after())
    advice = telemetry.advice()
    if advice:
        view.note(f"advice: {advice}")
    telemetry.close()
    leave_job()
    watchdog.close()


def open_chart(run: RunConfig, place: Place, found: Found | None) -> RunConfig:
    """Open the W&B run, when the configuration enables it; a continued run continues the chart of its checkpoint.

    Returns the configuration with the "wandb" section that DeepSpeed shall see: W&B must not stop a training.
    """
    from mdsp.metrics.monitor import start_wandb
    from mdsp.metrics.telemetry import describe_run

    state = found.manifest.training if found else None
    section = start_wandb(
        section=run.deepspeed.get("wandb", {}),
        run_directory=run.mdsp.monitor.dir,
        run_info=describe_run(run),
        enabled=place.rank == 0,
        run_id=state.wandb_run_id if state else None,
    )
    return replace(run, deepspeed={**run.deepspeed, "wandb": section})


def chart_id(run: RunConfig, place: Place) -> str | None:
    """Id of the W&B run, which rank 0 has when the configuration enables it."""
    if place.rank or not run.deepspeed.get("wandb", {}).get("enabled"):
        return None
    import wandb

    return str(wandb.run.id) if wandb.run is not None else None


def warn_of_spanning_groups(run: RunConfig, place: Place, view: TrainingView) -> None:
    """Say (or, with strict_topology, refuse) when tensor-parallel groups span nodes."""
    topology = Topology(run.layout.tensor, run.layout.pipeline, run.layout.data)
    warning = topology.check_nodes(place.ranks_per_node, run.mdsp.parallel.strict_topology)
    if warning:
        view.note(f"warning: {warning}")


def advance(run: RunConfig, counters: Counters, cursor: int) -> Counters:
    """Where training stands after the step that began at sample `cursor`."""
    batch = run.layout.global_batch
    tokens = counters.tokens + batch * run.mdsp.data.seq_length
    return replace(counters, step=counters.step + 1, samples=cursor + batch, tokens=tokens)


def set_learning_rate(run: RunConfig, engine: MdspEngine, counters: Counters) -> float:
    """Set the learning rate of the next step, and return it. With DeepSpeed's "scheduler", the engine has set it."""
    groups = engine.optimizer.param_groups
    if "scheduler" not in run.deepspeed:
        schedule, steps = run.mdsp.train.schedule, run.mdsp.train.steps
        per_step = run.layout.global_batch * run.mdsp.data.seq_length
        done, end, unit = (
            (counters.step, steps, 1) if schedule.unit == "steps" else (counters.tokens, steps * per_step, per_step)
        )
        peak = run.deepspeed["optimizer"]["params"]["lr"]
        for group in groups:
            group["lr"] = peak * learning_rate_factor(schedule, done + unit, end)
    return float(groups[0]["lr"])


def due(interval: int, step: int, last: bool) -> bool:
    """Whether something done every `interval` steps (0: never), and at the end, is to be done after `step`."""
    return interval > 0 and (last or step % interval == 0)


if __name__ == "__main__":
    sys.exit(main())
