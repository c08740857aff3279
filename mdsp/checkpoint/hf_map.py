"""Applies the tensor maps of a family to torch tensors: parameters out of Hugging Face tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from mdsp.checkpoint.pieces import Pieces
from mdsp.families.tensors import Piece, TensorMap
from mdsp.model.table import Parameter


def parameter_pieces(tensor: Tensor, entry: TensorMap, piece: Piece) -> Pieces:
    """One parameter, as rows of the Hugging Face tensor (of shape `entry.shape`) that holds it."""
    rows = tensor.t() if entry.transposed else tensor
    starts = range(piece.offset, entry.groups * entry.group_rows, entry.group_rows)
    return Pieces(tuple(rows[start : start + piece.rows] for start in starts))


def hf_pieces(entry: TensorMap, read: Callable[[Parameter], Pieces]) -> Iterator[Pieces]:
    """A Hugging Face tensor as runs of its rows, from whole parameters; `read` gives a parameter."""
    whole = [(piece, read(piece.parameter)) for piece in entry.pieces]
    if entry.transposed:
        turned = [parameter.transposed() for _, parameter in whole]
        if len(turned) == 1:
            yield turned[0]
        else:  # fused parameters lie side by side in the columns
            columns = tuple(
                view for part in turned for view in (part.views if part.dim == 1 else (part.materialize(),))
            )
            yield Pieces(columns, 1)
        return
    for group in range(entry.groups):
        for piece, parameter in whole:
            yield parameter.narrow(0, group * piece.rows, (group + 1) * piece.rows)
