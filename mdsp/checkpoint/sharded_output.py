"""A sharded checkpoint as the output of a conversion: layers, engine state, optimizer state, manifest, `latest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsp.checkpoint.atomic import sync_directory, write_atomic
from mdsp.checkpoint.conversion import Job, Progress, layer_jobs
from mdsp.checkpoint.hf_files import remove_tree
from mdsp.checkpoint.layout import HF_FILES, LATEST, LATEST_UNIVERSAL, stored_layers
from mdsp.checkpoint.manifest import FORMAT, Counters, Manifest, StoredFile, write_manifest
from mdsp.checkpoint.partial import plan_hash
from mdsp.checkpoint.rotation import tag_of
from mdsp.checkpoint.sharded_writer import ShardedWriter, Target
from mdsp.checkpoint.weights import HfWeights, ShardedWeights, dtype_name
from mdsp.checkpoint.whole import damage_of
from mdsp.errors import MdspError
from mdsp.model.table import parameter_table

if TYPE_CHECKING:
    from mdsp.checkpoint.training_part import TrainingPart


@dataclass
class ShardedOutput:
    """Weights at other degrees, of a checkpoint of training with the rest of it. See `mdsp.checkpoint.conversion`."""

    weights: HfWeights | ShardedWeights
    target: Target
    origin: Mapping[str, Any]
    """Where the weights come from, for the manifest."""
    copy_hf: Callable[[Path], tuple[StoredFile, ...]]
    """Copies tokenizer and configuration files into a directory."""
    verified: str
    counters: Counters = field(default_factory=Counters)
    names: Mapping[str, str] = field(default_factory=dict)
    """What the source calls a parameter, where it has a name of its own for it."""
    training: TrainingPart | None = None
    left_aside: tuple[str, ...] = ()
    optimizer_state: str = ""

    def __post_init__(self) -> None:
        self.parameters = len(parameter_table(self.weights.config))
        self.plan = {
            "make": "sharded checkpoint",
            "source": self.weights.fingerprint(),
            "tensor": self.target.tensor,
            "pipeline": self.target.pipeline,
            "blocks_per_stage": list(self.target.blocks_per_stage),
            "dtype": dtype_name(self.target.dtype) if self.target.dtype is not None else "auto",
            "optimizer_state": self.training is not None,
            "origin": dict(self.origin),
        }
        # Weights alone are no training that has come so far.
        self._tag = tag_of(self.counters.step if self.training is not None else 0)

    def prepare(self, directory: Path, advance: Callable[[int], None]) -> list[Job]:
        """A job for each layer, and one for each parameter's optimizer state."""
        tag = directory / self._tag
        tag.mkdir(exist_ok=True)
        whole = self.training is not None  # resuming compares files, not tensors
        self._writer = ShardedWriter(self.weights, self.target, tag, advance, self.names, whole)
        jobs = layer_jobs(self._writer, stored_layers(self.weights.config))
        return jobs if self.training is None else jobs + self.training.jobs(tag, advance)

    def open(self) -> None:
        """Nothing: files are opened one by one."""

    def close(self) -> None:
        """Nothing: files are closed one by one."""

    def finish(self, directory: Path) -> tuple[str, ...]:
        """Carried files, engine state, and last the manifest and `latest`."""
        tag, target, writer = directory / self._tag, self.target, self._writer
        remove_tree(tag / HF_FILES)
        (tag / HF_FILES).mkdir()
        carried = self.copy_hf(tag / HF_FILES)
        for entry in carried:
            writer.add(tag / entry.file)
        state = self._engine_state()
        files = [writer.write_state(state, rank) for rank in range(target.tensor * target.pipeline)]
        if self.training is not None:
            files += [*writer.all_files(), *self.training.finish()]
        writer.join()
        for folder in {(tag / entry.file).parent for entry in carried} | {tag / HF_FILES}:
            sync_directory(folder)
        manifest = Manifest(
            format=FORMAT,
            complete=True,
            what="weights" if self.training is None else "training",
            model=self.weights.config,
            tensor=target.tensor,
            pipeline=target.pipeline,
            blocks_per_stage=target.blocks_per_stage,
            tensors=writer.all_tensors(),
            files=tuple(sorted(files, key=lambda file: file.file)),
            hf_files=carried,
            origin=self.origin,
            made_by=plan_hash(self.plan),
            counters=self.counters,
            training=None if self.training is None else self.training.state,
        )
        write_manifest(manifest, tag)
        write_atomic(directory / LATEST, self._tag.encode())
        if self.training is not None:
            write_atomic(directory / LATEST_UNIVERSAL, self._tag.encode())
        return tuple(entry.file.removeprefix(f"{HF_FILES}/") for entry in carried)

    def _engine_state(self) -> dict[str, Any]:
        """What DeepSpeed's `load_checkpoint` looks for besides layers and optimizer state."""
        if self.training is not None:
            return self.training.engine_state(self.target)
        return {
            "module": None,
            "dp_world_size": 1,
            "mp_world_size": self.target.tensor * self.target.pipeline,
            "global_steps": 0,
            "global_samples": 0,
            "skipped_steps": 0,
        }

    def difference(self, directory: Path, progress: Progress, threads: int) -> str | None:
        """The manifest says what made it; then every tensor and file is compared with its hash."""
        try:
            found = ShardedWeights(directory)
        except MdspError as error:
            return str(error)
        if found.manifest.made_by != plan_hash(self.plan):
            return "it was made by another command, or from another source"
        for name in (LATEST, LATEST_UNIVERSAL) if self.training is not None else (LATEST,):
            path = directory / name
            if not path.is_file() or path.read_bytes() != self._tag.encode():
                return f"its {name} is another"
        return damage_of(found, progress, threads)
