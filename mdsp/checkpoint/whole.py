"""Whether a sharded checkpoint, converted or of training, is as it was written: everything against its hash."""

from __future__ import annotations

import math

from mdsp.checkpoint.conversion import Progress
from mdsp.checkpoint.jobs import run_jobs
from mdsp.checkpoint.layout import stored_layers
from mdsp.checkpoint.verify import all_files, check_files, damaged_file
from mdsp.checkpoint.weights import DTYPES, ShardedWeights
from mdsp.errors import CheckpointError
from mdsp.model.table import parameter_table


def damage_of(weights: ShardedWeights, progress: Progress, threads: int) -> str | None:
    """What is wrong with a part that is not as it was written; None when all is well.

    A checkpoint of training has a hash of every file, a converted one of every tensor and of all further files.
    """
    manifest, table = weights.manifest, parameter_table(weights.config).by_name
    files = all_files(manifest)
    layer_bytes = dict.fromkeys(stored_layers(weights.config), 0) if manifest.training is None else {}
    for entry in manifest.tensors if layer_bytes else ():
        layer_bytes[table[entry.parameter].layer] += math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    layers = list(layer_bytes)

    def compare(index: int) -> None:
        if index < len(layers):
            weights.verify(layers[index])
            progress.advance(layer_bytes[layers[index]])
            return
        file = files[index - len(layers)]
        problem = damaged_file(weights.directory, (file,))
        if problem is not None:
            raise CheckpointError(problem)
        progress.advance(file.size)

    try:
        check_files(weights.directory, files)
        progress.start(sum(layer_bytes.values()) + sum(file.size for file in files))
        run_jobs(range(len(layers) + len(files)), compare, threads)
    except CheckpointError as error:
        return str(error)
    return None
