"""How the tensors of a Hugging Face file and the parameters of the table correspond: one description, both directions.

A Hugging Face tensor is a stack of rows `[rows, ...]` (after transposing, for GPT-2's `[in, out]` matrices). The rows
fall into `groups` equal groups; inside each group the pieces of the parameters follow each other:

    groups = 1, one parameter          the tensor is the parameter
    groups = 1, several parameters     query rows, then key rows, then value rows (GPT-2, Phi-3); gate, then up (Phi-3)
    groups = heads, three parameters   per head: query, key, value (GPT-NeoX, BLOOM)

No torch here: `TensorMap` computes shapes and row numbers, `mdsp.checkpoint.slices` applies them to tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mdsp.model.table import Parameter, ParameterTable


@dataclass(frozen=True, slots=True)
class Module:
    """A module that has `.weight`, and `.bias` where the table has one, in both worlds.

    `hf` is its name in the Hugging Face model, `parameters` the names (without `.weight`) of the modules of the table
    that it holds, in the order in which their rows follow each other.
    """

    hf: str
    parameters: tuple[str, ...]
    transposed: bool = False
    """The weight is stored `[in, out]` (GPT-2's Conv1D)."""
    per_head: bool = False
    """Rows are grouped by head: query, key, value of head 0, then of head 1..."""


def module(hf: str, *parameters: str, transposed: bool = False, per_head: bool = False) -> Module:
    """Shorthand for a `Module`."""
    return Module(hf, parameters, transposed, per_head)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one parameter lies inside a Hugging Face tensor: `rows` rows from `offset` on, in each group."""

    parameter: Parameter
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One Hugging Face tensor and the parameters it holds."""

    name: str
    """Full Hugging Face name, e.g. `model.layers.0.self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    """Shape in the file."""
    pieces: tuple[Piece, ...]
    groups: int = 1
    transposed: bool = False

    @property
    def group_rows(self) -> int:
        """Rows of one group, all pieces together."""
        return sum(piece.rows for piece in self.pieces)


def build_map(
    name: str, suffix: str, parameters: tuple[Parameter, ...], groups: int = 1, transposed: bool = False
) -> TensorMap:
    """The map of the tensor `name.suffix` that holds these parameters; only matrices are ever transposed."""
    transposed = transposed and len(parameters[0].shape) == 2
    pieces, offset = [], 0
    for parameter in parameters:
        rows = parameter.shape[0] // groups
        pieces.append(Piece(parameter, offset, rows))
        offset += rows
    shape = (offset * groups, *parameters[0].shape[1:])
    return TensorMap(f"{name}.{suffix}", shape[::-1] if transposed else shape, tuple(pieces), groups, transposed)


def expand(
    modules: tuple[Module, ...], table: ParameterTable, groups: int, hf_prefix: str = "", table_prefix: str = ""
) -> Iterator[TensorMap]:
    """The maps of all tensors of these modules; weights and biases that the table does not have are left out.

    Raises:
        ValueError: a fused tensor of which the table has only some parameters (a mistake in a family file).
    """
    for entry in modules:
        for suffix in ("weight", "bias"):
            names = [f"{table_prefix}{parameter}.{suffix}" for parameter in entry.parameters]
            found = tuple(table.by_name[name] for name in names if name in table.by_name)
            if not found:
                continue
            if len(found) != len(names):
                raise ValueError(f"{hf_prefix}{entry.hf}.{suffix} holds {names}, but the model has only some of them")
            yield build_map(f"{hf_prefix}{entry.hf}", suffix, found, groups if entry.per_head else 1, entry.transposed)


def by_parameter(maps: tuple[TensorMap, ...]) -> Mapping[str, tuple[TensorMap, Piece]]:
    """For each parameter name, the tensor and the piece of it that holds it."""
    return {piece.parameter.name: (entry, piece) for entry in maps for piece in entry.pieces}
