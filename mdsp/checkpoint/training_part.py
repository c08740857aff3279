"""What `reshape` carries of a checkpoint of training besides the weights: optimizer state, engine state, counters.

The optimizer state is written in the universal form, one file per parameter and state, and not as ZeRO's files for each
rank: these depend on the data-parallel degree and on the precision of the run that will read them, which a reshape does
not know. It lies inside the checkpoint, because it is the only form there is of it, and the manifest lists every file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdsp.checkpoint.conversion import Job
from mdsp.checkpoint.engine_io import read_file
from mdsp.checkpoint.layout import state_file
from mdsp.checkpoint.manifest import StoredFile, TrainingState
from mdsp.checkpoint.optimizer_state import open_optimizer_state
from mdsp.checkpoint.sharded_writer import Target
from mdsp.checkpoint.universal import universal_checkpoint_info
from mdsp.checkpoint.universal_writer import UniversalWriter
from mdsp.checkpoint.verify import check_files, damaged_file
from mdsp.checkpoint.weights import ShardedWeights
from mdsp.errors import CheckpointError
from mdsp.model.table import Parameter, parameter_table


class TrainingPart:
    """The training state of an opened checkpoint, to be written beside its weights.

    Raises:
        CheckpointError: its optimizer state does not convert.
    """

    def __init__(self, weights: ShardedWeights) -> None:
        assert weights.manifest.training is not None
        self._directory = weights.directory
        self._manifest = weights.manifest
        self.state: TrainingState = weights.manifest.training.model_copy(update={"optimizer_form": "universal"})
        """For the new manifest."""
        check_files(self._directory, self._manifest.files)
        try:
            self._source = open_optimizer_state(self._directory, self._manifest, verify=True)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; --weights-only leaves it behind and writes the weights") from None
        self._files: dict[str, tuple[StoredFile, ...]] = {}

    def jobs(self, directory: Path, advance: Callable[[int], None]) -> list[Job]:
        """A job for each parameter, the largest first, so that none is left alone with it at the end."""
        self._writer = UniversalWriter(self._source, directory, advance)
        by_size = sorted(parameter_table(self._manifest.model), key=lambda p: (-p.numel, p.name))
        return [self._job(parameter) for parameter in by_size]

    def _job(self, parameter: Parameter) -> Job:
        def write() -> list[dict[str, Any]]:
            self._files[parameter.name] = tuple(self._writer.write(parameter))
            return [file.model_dump(mode="json") for file in self._files[parameter.name]]

        def accept(recorded: list[dict[str, Any]]) -> bool:
            files = tuple(StoredFile.model_validate(values) for values in recorded)
            self._files[parameter.name] = files
            return self._writer.accept(files)

        size = self._writer.parameter_bytes(parameter)
        return Job(f"optimizer state of {parameter.name}", size, write, accept)

    def finish(self) -> list[StoredFile]:
        """Write what belongs to no parameter and make everything durable; returns all files."""
        files = [file for written in self._files.values() for file in written]
        files.append(self._writer.write_global_state())
        self._writer.join()
        return files

    def engine_state(self, target: Target) -> dict[str, Any]:
        """The engine's state, which is the same on all ranks but for their shapes and the degrees."""
        name = state_file(0)
        problem = damaged_file(self._directory, tuple(file for file in self._manifest.files if file.file == name))
        if problem is not None:
            raise CheckpointError(problem)
        found: dict[str, Any] = read_file(self._directory / name)
        found.pop("param_shapes", None)  # of one rank, for a script that gathers ZeRO's own files
        return found | {
            "mp_world_size": target.tensor * target.pipeline,
            "checkpoint_parallel_dimensions": {"pp_degree": target.pipeline, "tp_degree": target.tensor},
            "universal_checkpoint_info": universal_checkpoint_info(self._manifest.model, target.tensor),
        }
