"""`mdsp plan`: which layouts of a model fit a cluster, how fast each is, and the JSON that runs the best."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdsp.plan.calibrate import Efficiencies
    from mdsp.plan.models import NamedModel
    from mdsp.plan.search import Plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mdsp plan`."""
    what = parser.add_argument_group("what to plan")
    what.add_argument(
        "--model", metavar="MODEL", help="a name (gpt3-175b), a size (530B), a Hugging Face directory, or a JSON file"
    )
    what.add_argument(
        "--cluster", metavar="CLUSTER", help="NODESxDEVICESxDEVICE, for example 128x8xH100, or a JSON file"
    )
    what.add_argument("--global-batch", type=int, metavar="N", help="sequences per optimizer step")
    what.add_argument("--seq", type=int, metavar="N", help="tokens per sequence")
    what.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default=None, help="default bf16 (fp16 on V100)")
    what.add_argument("--tokens", type=float, metavar="N", help="training tokens (1e12): adds days and device-hours")
    what.add_argument(
        "--explain", metavar="CONFIG", help="say what each rank of an existing configuration holds and costs"
    )
    fixed = parser.add_argument_group("leave less to the search")
    fixed.add_argument("--tensor", type=int, metavar="N", help="tensor-parallel degree")
    fixed.add_argument("--pipeline", type=int, metavar="N", help="pipeline stages")
    fixed.add_argument("--micro-batch", type=int, metavar="N", help="sequences per micro-batch")
    fixed.add_argument("--recompute", choices=("none", "selective", "full"), help="activation recomputation")
    out = parser.add_argument_group("output")
    out.add_argument("--top", type=int, default=10, metavar="N", help="layouts in the table (10)")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out.add_argument("--write", metavar="FILE", help="write the DeepSpeed JSON that runs the best layout")
    out.add_argument("--plot", metavar="FILE", help="draw step time against memory, and the timeline (.png or .html)")
    out.add_argument(
        "--calibrate",
        metavar="RUN",
        action="append",
        default=[],
        help="adjust efficiencies to a measured run; repeatable",
    )
    out.add_argument("--list", action="store_true", help="print the known models and devices")


def main(args: argparse.Namespace) -> int:
    """Run `mdsp plan`; returns the exit code. Raises ConfigError for a request that cannot be planned."""
    from mdsp.errors import ConfigError

    if args.list:
        return _list()
    if args.explain:
        return _explain(args)
    missing = [name for name in ("model", "cluster", "global_batch", "seq") if getattr(args, name) is None]
    if missing:
        needs = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"mdsp plan needs {needs}; for example: mdsp plan --model gpt3-175b --cluster 128x8xH100 "
            f"--global-batch 1536 --seq 2048"
        )
    model, plan, efficiencies = _planned(args)
    return _output(args, model, plan, efficiencies)


def _planned(args: argparse.Namespace) -> tuple[NamedModel, Plan, Efficiencies]:
    from mdsp.errors import ConfigError
    from mdsp.plan.calibrate import calibrated
    from mdsp.plan.hardware import parse_cluster
    from mdsp.plan.layout import Precision, Workload
    from mdsp.plan.models import find_model
    from mdsp.plan.reasons import what_would_fit
    from mdsp.plan.search import Limits, search

    for name in ("global_batch", "seq", "tensor", "pipeline", "micro_batch", "top"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.tokens is not None and not 0 < args.tokens < 1e18:
        raise ConfigError(f"--tokens {args.tokens:g}: must be a number of tokens above 0, for example 1e12")
    cluster = parse_cluster(args.cluster)
    precision: Precision = args.precision or ("fp16" if cluster.device.architecture == "volta" else "bf16")
    if precision == "bf16" and cluster.device.architecture == "volta":
        raise ConfigError(f"--precision bf16: {cluster.device.name} has no bf16 matrix units; use fp16")
    model = find_model(args.model)
    if model.config.position == "learned" and args.seq > model.config.max_positions:
        raise ConfigError(
            f"--seq {args.seq}: {model.name} has {model.config.max_positions} learned positions; use at most that"
        )
    efficiencies = calibrated(args.calibrate).on(cluster)
    work = Workload(model.config, args.seq, args.global_batch, precision)
    limits = Limits(args.tensor, args.pipeline, args.micro_batch, args.recompute)
    plan = search(work, cluster, efficiencies.constants, efficiencies.band, limits)
    if not plan.fitting:
        raise ConfigError(what_would_fit(plan))
    return model, plan, efficiencies


def _output(args: argparse.Namespace, model: NamedModel, plan: Plan, efficiencies: Efficiencies) -> int:
    best = plan.fitting[0]
    if args.write:
        from mdsp.plan.write import write_config

        write_config(args.write, model, plan, best)
    if args.plot:
        from mdsp.plan.plot import plot

        plot(args.plot, model.name, plan, best)
    if args.json:
        from mdsp.plan.as_json import plan_json

        print(plan_json(model, plan, args.top, args.tokens))
        return 0
    from rich.console import Console

    from mdsp.plan import render

    console = Console(highlight=False, soft_wrap=False)
    render.header(console, model, plan)
    for line in efficiencies.notes:
        console.print(line)
    console.print()
    render.ranking(console, plan, args.top, args.tokens)
    render.breakdown(console, plan, best)
    render.reasons(console, plan)
    for what, path in (("configuration", args.write), ("picture", args.plot)):
        if path:
            console.print(f"\n{what} written to {path}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from mdsp.errors import ConfigError
    from mdsp.plan.calibrate import calibrated
    from mdsp.plan.explain import explained_config
    from mdsp.plan.hardware import parse_cluster

    if not args.cluster:
        raise ConfigError(
            f"--explain {args.explain} also needs --cluster: the devices it runs on, for example 1x8xA100"
        )
    cluster = parse_cluster(args.cluster)
    efficiencies = calibrated(args.calibrate).on(cluster)
    model, plan, candidate = explained_config(args.explain, cluster, efficiencies)
    if args.plot:
        from mdsp.plan.plot import plot

        plot(args.plot, model.name, plan, candidate)
    if args.json:
        from mdsp.plan.as_json import explain_json

        print(explain_json(model, plan, candidate))
        return 0
    from rich.console import Console

    from mdsp.plan import render

    console = Console(highlight=False)
    render.header(console, model, plan)
    for line in efficiencies.notes:
        console.print(line)
    render.explained(console, plan, candidate)
    return 0


def _list() -> int:
    from mdsp.model.table import parameter_table
    from mdsp.plan.hardware import DEVICES
    from mdsp.plan.models import model_names, named_model

    print("models (parameters)")
    for name in model_names():
        print(f"  {name:16s} {parameter_table(named_model(name)).numel:>17,d}")
    print("devices (GB, dense 16-bit TFLOP/s, memory TB/s, link GB/s and network Gbit/s one way)")
    for device in DEVICES.values():
        print(
            f"  {device.name:12s} {device.memory_bytes / 1e9:5.0f} {device.half_flops / 1e12:7.0f} "
            f"{device.hbm_bytes_per_s / 1e12:6.2f} {device.link_bytes_per_s / 1e9:5.0f} "
            f"{device.network_bytes_per_s * 8 / 1e9:5.0f}"
        )
    return 0
