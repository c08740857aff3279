"""Saving a training checkpoint: temporary directory, hashed and fsynced files, manifest, rename, `latest`.

Whatever is killed when, the directory holds the old checkpoint or the old and the new one, never half of one under its
final name.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from mdsp.checkpoint import manifest as files
from mdsp.checkpoint.atomic import write_atomic
from mdsp.checkpoint.counters import Counters
from mdsp.checkpoint.engine_io import TrainingCheckpointEngine, WrittenFile, checkpoint_engine
from mdsp.checkpoint.hf_files import carried_files, copy_files
from mdsp.checkpoint.layout import HF_FILES, LATEST, layer_file, stored_layers, stored_parameters
from mdsp.checkpoint.manifest import Manifest, StoredFile, StoredTensor, TrainingState, write_manifest
from mdsp.checkpoint.rotation import SAVING_PREFIX, publish_tree, tag_of
from mdsp.checkpoint.universal import universal_checkpoint_info
from mdsp.config.run_config import RunConfig
from mdsp.errors import CheckpointError
from mdsp.model.table import parameter_table

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine


class PendingSave:
    """A save that has been started: training may go on while `done` is False.

    Started and finished by all ranks together; between that, nothing is collective.
    """

    def __init__(
        self, engine: MdspEngine, run: RunConfig, directory: Path, counters: Counters, background: bool
    ) -> None:
        """Collective. Takes what is to be written; writes it at once, or in a thread when `background`."""
        self.directory = directory
        self.tag = tag_of(counters.step)
        self.counters = counters
        self.stall_s = 0.0
        """Seconds for which training stood still."""
        self.remark: str | None = None
        """What the finished checkpoint lacks, on rank 0."""
        self._run = run
        self._work = directory / f"{SAVING_PREFIX}{self.tag}"
        self._thread: threading.Thread | None = None
        started = time.perf_counter()
        root = self._work / self.tag
        self._io = TrainingCheckpointEngine(root, deferred=background)
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(self._work, ignore_errors=True)
                root.mkdir(parents=True)
            except OSError as error:
                self._io.failure = error
        engine.module.universal_checkpoint_info = universal_checkpoint_info(run.model, run.layout.tensor)
        with checkpoint_engine(engine, self._io):
            engine.save_checkpoint(str(self._work), tag=self.tag, save_latest=False)
        if background:
            self._thread = threading.Thread(target=self._io.write, name="checkpoint writer", daemon=True)
            self._thread.start()
        self.stall_s += time.perf_counter() - started

    @property
    def written(self) -> bool:
        """Whether this rank's files are on the disk."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Path:
        """Wait until all ranks have written, and make the checkpoint complete. Collective.

        Raises:
            CheckpointError: on all ranks alike, when one of them could not write. Older checkpoints are untouched.
        """
        started = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        mine = (None if self._io.failure is None else _reason(self._io.failure), self._io.written)
        gathered: list[tuple[str | None, list[WrittenFile]]] = [mine] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        failures = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(gathered) if reason is not None]
        outcome: list[str | None] = [None]
        if dist.get_rank() == 0:
            if not failures:
                try:
                    self._publish([file for _, written in gathered for file in written])
                except (OSError, CheckpointError) as error:
                    failures = [f"rank 0: {_reason(error)}"]
            if failures:
                shutil.rmtree(self._work, ignore_errors=True)
                more = " ..." if len(failures) > 4 else ""
                outcome[0] = (
                    f"checkpoint {self.directory / self.tag} could not be written: {'; '.join(failures[:4])}{more}; "
                    f"earlier checkpoints are untouched. Free space, or set mdsp.checkpoint.dir to another place"
                )
        dist.broadcast_object_list(outcome, src=0)
        self.stall_s += time.perf_counter() - started
        if outcome[0] is not None:
            raise CheckpointError(outcome[0])
        return self.directory / self.tag

    def _publish(self, written: list[WrittenFile]) -> None:
        root = self._work / self.tag
        # It was there when training started; to lose the weights as well would help nobody.
        self.remark = tokenizer_problem(self._run)
        hf_files = () if self.remark else _carry_tokenizer(self._run, root)
        stored = sorted((file.stored for file in written), key=lambda file: file.file)
        manifest = _manifest(self._run, self.counters, written, tuple(stored), hf_files)
        write_manifest(manifest, root)
        publish_tree(root, self.directory / self.tag)
        write_atomic(self.directory / LATEST, self.tag.encode())
        shutil.rmtree(self._work, ignore_errors=True)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return str(error)


def _manifest(
    run: RunConfig,
    counters: Counters,
    written: list[WrittenFile],
    stored: tuple[StoredFile, ...],
    hf_files: tuple[StoredFile, ...],
) -> Manifest:
    by_name = {file.stored.file: file for file in written}
    tensors = []
    for layer in stored_layers(run.model):
        for rank in range(run.layout.tensor):
            name = layer_file(layer, rank)
            held = by_name[name].tensors
            for parameter in stored_parameters(run.model, layer):
                shape, dtype, digest = held[parameter.attribute]
                tensors.append(
                    StoredTensor.model_validate(
                        {
                            "parameter": parameter.name,
                            "rank": rank,
                            "file": name,
                            "key": parameter.attribute,
                            "shape": shape,
                            "dtype": dtype,
                            "hash": digest,
                        }
                    )
                )
    order = {parameter.name: index for index, parameter in enumerate(parameter_table(run.model))}
    tensors.sort(key=lambda entry: (order[entry.parameter], entry.rank))
    source = run.mdsp.model.get("from_hf")
    return Manifest(
        format=files.FORMAT,
        complete=True,
        what="training",
        model=run.model,
        tensor=run.layout.tensor,
        pipeline=run.layout.pipeline,
        blocks_per_stage=run.layout.blocks_per_stage,
        tensors=tuple(tensors),
        hf_files=hf_files,
        origin={"from_hf": source} if source else {"seed": run.mdsp.train.seed},
        counters=files.Counters(step=counters.step, samples=counters.samples, tokens=counters.tokens),
        training=TrainingState(
            data=run.layout.data,
            precision=run.precision,
            optimizer=run.deepspeed["optimizer"]["type"],
            zero_stage=run.deepspeed.get("zero_optimization", {}).get("stage", 0),
            global_batch=run.layout.global_batch,
            best_eval_loss=counters.best_eval_loss,
            wandb_run_id=counters.wandb_run_id,
            skipped_steps=counters.skipped_steps,
            bad_steps=counters.bad_steps,
            recent_losses=counters.recent_losses,
            skipped_samples=counters.skipped_samples,
        ),
        files=stored,
    )


def tokenizer_problem(run: RunConfig) -> str | None:
    """Why `mdsp.data.tokenizer` cannot go into a checkpoint; None when it can, or when there is none."""
    if run.mdsp.data.tokenizer is None:
        return None
    source = Path(run.mdsp.data.tokenizer)
    way_out = "give the directory that `mdsp prepare` wrote, or that of the Hugging Face model"
    try:
        if not source.is_dir():
            return f"mdsp.data.tokenizer = {source} is not a directory; {way_out}"
        if not carried_files(source):
            return f"mdsp.data.tokenizer = {source} holds no files of a tokenizer; {way_out}"
    except OSError as error:
        return f"mdsp.data.tokenizer = {source} cannot be read: {error.strerror}"
    return None


def _carry_tokenizer(run: RunConfig, root: Path) -> tuple[StoredFile, ...]:
    """Copy the tokenizer into the checkpoint, so that an export needs nothing else."""
    if run.mdsp.data.tokenizer is None:
        return ()
    carried = copy_files(Path(run.mdsp.data.tokenizer), root / HF_FILES, f"{HF_FILES}/")
    for file in carried:
        descriptor = os.open(root / file.file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return carried


def save_training_checkpoint(engine: MdspEngine, run: RunConfig, directory: Path, counters: Counters) -> Path:
    """Save all that `run` needs to continue, as `directory`/global_stepN. Collective; returns its path.

    Raises:
        CheckpointError: on all ranks alike, when it could not be written. Older checkpoints are untouched.
    """
    return PendingSave(engine, run, directory, counters, background=False).finish()
