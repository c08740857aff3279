"""DeepSpeed's universal checkpoint: master weights and optimizer state per parameter, whole, whatever the layout.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    zero/optimizer_state.pt
    mp_rank_*_model_states.pt

The format is DeepSpeed's (`deepspeed.checkpoint.ds_to_universal`). It is found in two places: `global_stepN_universal`
beside a checkpoint that was resumed at another layout, made from that checkpoint and removable at any time; and inside
`global_stepN` of a checkpoint of training that `mdsp convert reshape` wrote, as the only form of its optimizer state.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mdsp.checkpoint.hashing import file_hash
from mdsp.checkpoint.layout import MANIFEST
from mdsp.checkpoint.manifest import StoredFile
from mdsp.checkpoint.rotation import UNIVERSAL_SUFFIX
from mdsp.model.config import ModelConfig
from mdsp.model.table import Parameter, parameter_table

TIED_KEY = "embedding"
"""Under which DeepSpeed's PipelineModule keeps the module that two stages share."""
DESCRIPTION = "universal.json"
"""Lists the files of `global_stepN_universal` with their hashes."""
FOLDER = "zero"
"""Folder of the optimizer state inside a checkpoint."""
MASTER_WEIGHT = "fp32"
"""Name of the state that is the weight itself."""
STEP = "step"
"""Name of the state that is the optimizer's step count: a number, not a tensor of the parameter's shape."""
GLOBAL_STATE = f"{FOLDER}/optimizer_state.pt"
"""File of what belongs to no parameter."""


def engine_name(parameter: Parameter) -> str:
    """What the engine calls a parameter: by the global index of its layer, so the same at every number of stages."""
    owner = f"tied_modules.{TIED_KEY}" if parameter.tied_layers else str(parameter.layer)
    return f"{owner}.{parameter.attribute}"


def state_folder(parameter: Parameter) -> str:
    """Folder of a parameter's states."""
    return f"{FOLDER}/{engine_name(parameter)}"


def universal_checkpoint_info(config: ModelConfig, tensor: int) -> dict[str, Any]:
    """What DeepSpeed's own converter needs to know about how tensor parallelism splits each parameter.

    It matches by regular expression; here each matches one name.
    """
    replicated, columns, vocabulary, tied = [], [], [], []
    for parameter in parameter_table(config):
        pattern = f"{re.escape(engine_name(parameter))}$"
        if parameter.tied_layers:
            tied.append(pattern)
        if parameter.padded_rows:
            vocabulary.append(pattern)
        elif not parameter.is_split(tensor):
            replicated.append(pattern)
        elif parameter.split_dim == 1:
            columns.append(pattern)
    return {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": config.vocab_size,
        "vocabulary_parameter_patterns": vocabulary,
        "pipeline_replicated_parameter_patterns": tied,
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": columns,
        "parameter_to_average_patterns": [],
        "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_with_sub_params": [],
    }


def universal_directory(checkpoint: Path) -> Path:
    """Where the universal form of a checkpoint lies."""
    return checkpoint.with_name(checkpoint.name + UNIVERSAL_SUFFIX)


def read_description(checkpoint: Path) -> tuple[StoredFile, ...] | None:
    """The files of the universal form of a checkpoint, None when there is no finished one of just this checkpoint."""
    path = universal_directory(checkpoint) / DESCRIPTION
    try:
        values = json.loads(path.read_bytes())
        files = tuple(StoredFile.model_validate(file) for file in values["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if values.get("source") == file_hash(checkpoint / MANIFEST) else None
