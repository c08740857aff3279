"""`mdsp dashboard`: makes the W&B workspace, or writes its definition to a file when W&B cannot be reached."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mdsp.output_file import write_output


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", help="directory of a run, to take project and team from")
    parser.add_argument("--project", help="W&B project (default: the run's)")
    parser.add_argument("--entity", help="W&B user or team (default: the run's)")
    parser.add_argument("--name", default="mdsp", help="name of the workspace view")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="only write the definition to this JSON file (default when offline: mdsp-dashboard.json)",
    )


def main(args: argparse.Namespace) -> int:
    from mdsp.errors import ConfigError
    from mdsp.metrics.dashboard import definition
    from mdsp.metrics.run import read_run

    section = {} if args.run is None else (read_run(args.run).info.get("deepspeed") or {}).get("wandb") or {}
    project, entity = args.project or section.get("project"), args.entity or section.get("team") or ""
    if not project:
        raise ConfigError('no W&B project is known; give --project, or a run whose configuration has "wandb.project"')
    problem = "" if args.output is not None else _save(args.name, entity, project)
    if problem is None:
        return 0
    output: Path = args.output or Path("mdsp-dashboard.json")
    write_output(output, json.dumps(definition(args.name, entity, project), indent=2) + "\n")
    if problem:
        print(f"W&B cannot be reached ({problem}); run this command again when it can", file=sys.stderr)
    print(f"{output}: definition of the workspace")
    return 0


def _save(name: str, entity: str, project: str) -> str | None:
    """Save the workspace; None when it worked, else what went wrong."""
    from mdsp.metrics.dashboard import workspace

    try:
        import wandb

        if not wandb.login(prompt=False):
            return "not logged in; wandb login"
        saved = workspace(name, entity or wandb.Api().default_entity, project)
        saved.save()
    except Exception as error:  # not installed, no network, no permission: the file is the answer to all
        return f"{type(error).__name__}: {error}"
    print(saved.url)
    return None
