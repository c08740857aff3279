"""Finding the checkpoint to continue from, and continuing from it, at the layout it was saved at or at any other."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mdsp.checkpoint.counters import Counters, counters_of
from mdsp.checkpoint.engine_io import TrainingCheckpointEngine, checkpoint_engine, read_file
from mdsp.checkpoint.layout import LATEST, MANIFEST, state_file
from mdsp.checkpoint.manifest import Manifest, StoredFile
from mdsp.checkpoint.rotation import checkpoints_in
from mdsp.checkpoint.universal import read_description, universal_directory
from mdsp.checkpoint.universal_load import load_universal
from mdsp.checkpoint.universal_writer import convert_to_universal
from mdsp.checkpoint.verify import all_files, check_files, damaged_file, open_manifest
from mdsp.config.run_config import RunConfig
from mdsp.errors import CheckpointError
from mdsp.model.config import ModelConfig

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine

MAY_CHANGE = {"embedding_dropout", "hidden_dropout", "attention_dropout", "init_std", "max_positions", "family"}
"""Fields of the model that a resumed run may set anew: they are not in the weights. Of max_positions, see below."""


@dataclass(frozen=True)
class Found:
    """A complete checkpoint whose every byte is as it was written."""

    path: Path
    """Its directory."""
    manifest: Manifest
    """What it holds."""
    passed_over: tuple[str, ...] = ()
    """Newer ones that were not taken, with the reason."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.counters.step


def find_checkpoint(directory: Path | None, resume: str) -> Found | None:
    """The checkpoint that `mdsp.checkpoint.resume` means. Collective when torch.distributed is initialised.

    Args:
        directory: `mdsp.checkpoint.dir`.
        resume: "none"; "auto": the newest complete one in `directory`, None when there is none at all; else the path
            of one checkpoint, or of a directory of checkpoints whose newest complete one is meant.

    Raises:
        CheckpointError: on all ranks alike: what was asked for is missing or damaged, or "auto" finds checkpoints but
            none that is whole (a fresh start would then be a surprise).
    """
    if resume == "none":
        return None
    if resume == "auto":
        if directory is None:
            raise CheckpointError('mdsp.checkpoint.resume is "auto", which needs mdsp.checkpoint.dir; set it')
        return _newest(directory, required=False)
    path = Path(resume)
    problem: str | None = None
    single = False
    if _is_first():
        single = (path / MANIFEST).exists() or not checkpoints_in(path)
        if not path.is_dir():
            problem = f"mdsp.checkpoint.resume = {resume}: there is no such directory; training does not start from 0"
    problem, single = _from_first((problem, single))
    if problem is not None:
        raise CheckpointError(f'{problem}. Use "auto" or "none" if a fresh start is meant')
    if not single:
        return _newest(path, required=True)
    manifest, reason = _examine(path)
    if manifest is None:
        raise CheckpointError(f"mdsp.checkpoint.resume = {resume}: {reason}")
    return Found(path, manifest)


def _newest(directory: Path, required: bool) -> Found | None:
    candidates: list[Path] = _from_first(checkpoints_in(directory) if _is_first() else [])
    passed_over: list[str] = _from_first(_dangling_latest(directory) if _is_first() else [])
    for path in candidates:
        manifest, reason = _examine(path)
        if manifest is not None:
            return Found(path, manifest, tuple(passed_over))
        passed_over.append(str(reason))
    if not candidates and not required:
        return None
    listed = "".join(f"\n  {reason}" for reason in passed_over)
    raise CheckpointError(
        f"{directory} holds no complete checkpoint{':' if listed else ''}{listed}\nRepair or remove "
        f'them, or set mdsp.checkpoint.resume to "none" for a fresh start'
    )


def _dangling_latest(directory: Path) -> list[str]:
    """A remark when `latest` names nothing that is there. It is a hint for other tools: manifests decide here."""
    try:
        tag = (directory / LATEST).read_text(encoding="utf-8", errors="replace")[:256].strip()
    except OSError:
        return []
    if tag in {path.name for path in checkpoints_in(directory)}:
        return []
    return [f"{directory / LATEST} names {tag!r}, which does not exist"]


def _examine(path: Path) -> tuple[Manifest | None, str | None]:
    """(manifest, None) of a whole checkpoint, (None, what is wrong) of another. The ranks share the reading."""
    manifest: Manifest | None = None
    reason: str | None = None
    if _is_first():
        try:
            manifest = open_manifest(path)
        except (CheckpointError, OSError) as error:
            reason = str(error)
    manifest, reason = _from_first((manifest, reason))
    if manifest is None:
        return None, reason
    reason = _share_reading(path, all_files(manifest))
    return (manifest, None) if reason is None else (None, reason)


def _share_reading(directory: Path, files: tuple[StoredFile, ...]) -> str | None:
    """What is wrong with the bytes of these files, the same answer on all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = damaged_file(directory, tuple(sorted(files, key=lambda file: -file.size)[rank::ranks]))
    reasons = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(reasons, mine)
    return next((reason for reason in reasons if reason is not None), None)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_first(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def load_training_checkpoint(engine: MdspEngine, run: RunConfig, found: Found) -> Counters:
    """Weights, master weights, optimizer state, loss scale and step into the engine. Collective; returns the counters.

    At another layout or precision than the checkpoint's, its universal form is made (once) and read instead.
    Hyperparameters of the optimizer and clipping are the configuration's, not the checkpoint's.

    Raises:
        CheckpointError: on all ranks alike: another model or optimizer, or files that cannot be read.
    """
    manifest = found.manifest
    check_same_model(manifest.model, run.model, found.path)
    state = manifest.training
    assert state is not None
    kind = run.deepspeed["optimizer"]["type"]
    if state.optimizer.lower() != kind.lower():
        raise CheckpointError(
            f"{found.path} was trained with {state.optimizer}, and optimizer.type is {kind}: their states do not "
            f"convert. Set optimizer.type to {state.optimizer}"
        )
    with _configured_hyperparameters(engine):
        if same_layout(manifest, run):
            _load_direct(engine, found)
        else:
            _load_universal(engine, found)
    counters = counters_of(manifest)
    engine.global_steps = counters.step
    engine.global_samples = counters.step * state.global_batch
    engine.skipped_steps = counters.skipped_steps
    return counters


def check_same_model(saved: ModelConfig, wanted: ModelConfig, path: Path) -> None:
    """CheckpointError that names the first field in which the models differ, where it matters to the weights."""
    for field in type(saved).model_fields:
        if field in MAY_CHANGE and not (field == "max_positions" and saved.position == "learned"):
            continue
        old, new = getattr(saved, field), getattr(wanted, field)
        if old != new:
            raise CheckpointError(
                f"{path} holds another model: its {field} is {old!r}, mdsp.model says {new!r}. Resume with the model "
                f"that was saved, or start afresh in another mdsp.checkpoint.dir"
            )


def same_layout(manifest: Manifest, run: RunConfig) -> bool:
    """Whether the engine can read the checkpoint's own files, rank by rank."""
    state, layout = manifest.training, run.layout
    assert state is not None
    return (
        (manifest.tensor, manifest.pipeline, state.data) == (layout.tensor, layout.pipeline, layout.data)
        and manifest.blocks_per_stage == layout.blocks_per_stage
        and state.precision == run.precision
        and state.optimizer_form == "per_rank"
        and state.zero_stage == run.deepspeed.get("zero_optimization", {}).get("stage", 0)
    )


@contextlib.contextmanager
def _configured_hyperparameters(engine: MdspEngine) -> Iterator[None]:
    """Whatever the files say, the optimizer keeps the hyperparameters that the configuration gave it.

    Not the learning rate of DeepSpeed's "scheduler", which is a state and not a setting.
    """
    inner: Any = getattr(engine.optimizer, "optimizer", engine.optimizer)
    fixed = {"params"} if engine.lr_scheduler is None else {"params", "lr"}
    kept = [{key: value for key, value in group.items() if key not in fixed} for group in inner.param_groups]
    clip_grad = getattr(engine.optimizer, "clip_grad", None)
    yield
    for group, values in zip(inner.param_groups, kept, strict=True):
        group.update(values)
    if clip_grad is not None:
        engine.optimizer.clip_grad = clip_grad


def _load_direct(engine: MdspEngine, found: Found) -> None:
    failure: str | None = None
    # DeepSpeed prints every file, and a left-over of its own debugging.
    with checkpoint_engine(engine, TrainingCheckpointEngine()), contextlib.redirect_stdout(io.StringIO()):
        try:
            loaded, _ = engine.load_checkpoint(str(found.path.parent), tag=found.path.name)
            failure = None if loaded is not None else f"{found.path}: DeepSpeed found nothing to load"
        except CheckpointError as error:
            failure = str(error)
    _raise_together(failure)


def _load_universal(engine: MdspEngine, found: Found) -> None:
    state = found.manifest.training
    assert state is not None
    own = state.optimizer_form == "universal"
    if state.zero_stage != 1 or engine.zero_optimization_stage() != 1:
        layout = f"tensor {found.manifest.tensor}, pipeline {found.manifest.pipeline}, data {state.data}"
        way_out = "" if own else f", or resume at {layout}, {state.precision}"
        raise CheckpointError(
            f"{found.path} was saved at another layout, and only ZeRO stage 1 keeps its optimizer state in a form that "
            f"converts; set zero_optimization.stage to 1{way_out}"
        )
    directory, files = (found.path, found.manifest.files) if own else _universal_form(found)
    failure: str | None = None
    try:
        load_universal(engine, directory, files)
        scheduler = read_file(directory / state_file(0)).get("lr_scheduler")
        if engine.lr_scheduler is not None and scheduler is not None:
            engine.lr_scheduler.load_state_dict(scheduler)
    except CheckpointError as error:
        failure = str(error)
    _raise_together(failure)


def _universal_form(found: Found) -> tuple[Path, tuple[StoredFile, ...]]:
    """The universal form that lies beside a checkpoint and its files, made first where it is missing or damaged."""
    directory = universal_directory(found.path)
    files: tuple[StoredFile, ...] | None = None
    if _is_first():
        files = read_description(found.path)
        if files is not None:
            try:
                check_files(directory, files)
            except CheckpointError:
                files = None
    files = _from_first(files)
    if files is not None and _share_reading(directory, files) is not None:
        files = None
    if files is None:
        convert_to_universal(found.path, found.manifest)
        files = _from_first(read_description(found.path) if _is_first() else None)
        assert files is not None
    return directory, files


def _raise_together(failure: str | None) -> None:
    failures = [failure]
    if dist.is_initialized():
        failures = [failure] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    first = next((reason for reason in failures if reason is not None), None)
    if first is not None:
        raise CheckpointError(first)
