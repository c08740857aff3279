"""Weights on disk as parameters of the table: a Hugging Face directory, or a sharded checkpoint, any slice.

Both give any rank's piece of any parameter at any tensor-parallel degree, as views of mapped files. This is what
conversion, comparison and the start of training from `{"from_hf": DIR}` read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from mdsp.checkpoint.hf_map import parameter_pieces
from mdsp.checkpoint.hf_reader import HfDirectory, load_pickle
from mdsp.checkpoint.layout import stored_parameters
from mdsp.checkpoint.manifest import StoredTensor, manifest_bytes, read_manifest, stored_path
from mdsp.checkpoint.partial import refuse_partial
from mdsp.checkpoint.pieces import Pieces
from mdsp.checkpoint.source_hashes import SourceHashes
from mdsp.errors import CheckpointError
from mdsp.families import get_family, model_config_from_hf
from mdsp.families.tensors import by_parameter
from mdsp.model.config import ModelConfig
from mdsp.model.table import Parameter, Shard

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types of elements by their name in manifests and on the command line."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type of elements, as in manifests."""
    return next(name for name, one in DTYPES.items() if one == dtype)


class Weights(Protocol):
    """Parameters of a model on disk."""

    path: Path
    config: ModelConfig

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type of the elements on disk."""
        ...

    def pieces(self, parameter: Parameter, tensor: int, rank: int) -> Pieces:
        """What `rank` of a tensor-parallel group of size `tensor` holds, without vocabulary padding."""
        ...

    def verify(self, layer: int) -> None:
        """Check what is stored for a pipeline layer against its hashes, where there are any; once."""
        ...

    def checked(self, layer: int) -> AbstractContextManager[Callable[[Tensor], None]]:
        """`verify` beside the reading of a layer: the function gets views of it before they are read.

        What was made of the layer is good only when the context has been left without an error.
        """
        ...

    def fingerprint(self) -> str:
        """Identifies the content."""
        ...


def whole(parameter: Parameter) -> Shard:
    """The shard that is all of a parameter."""
    return Shard(0, 0, parameter.shape[0])


class HfWeights:
    """A Hugging Face directory, every tensor of which is matched with the model when it is opened.

    Raises:
        ConfigError: `config.json` is not understood.
        CheckpointError: tensors are missing, left over, of the wrong shape, or not readable without running code.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = model_config_from_hf(path)
        self.family = get_family(self.config.family)
        self.directory = HfDirectory(path)
        self.names, self.left_aside = self.directory.resolve(self.family, self.config)
        self._maps = by_parameter(self.family.tensors(self.config))

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type of the elements in the file."""
        return self.directory.tensors[self.names[self._maps[parameter.name][0].name]].dtype

    def pieces(self, parameter: Parameter, tensor: int, rank: int) -> Pieces:
        """One rank's share of a parameter, as rows and columns of the mapped file."""
        entry, piece = self._maps[parameter.name]
        shard = parameter.shard(tensor, rank) or whole(parameter)
        found = parameter_pieces(self.directory.tensor(self.names[entry.name]), entry, piece)
        return found.narrow(shard.dim, shard.start, shard.stop)

    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        """One rank's share of a parameter, in memory of its own, without vocabulary padding."""
        return self.pieces(parameter, tensor, rank).materialize()

    def verify(self, layer: int) -> None:
        """Hugging Face files carry no hashes; their structure was checked when they were opened."""

    @contextmanager
    def checked(self, layer: int) -> Iterator[Callable[[Tensor], None]]:
        """Nothing to check, as in `verify`."""
        yield lambda view: None

    def fingerprint(self) -> str:
        """Identifies the content by `config.json`, the headers and the files' sizes and times."""
        digest = xxhash.xxh3_128((self.path / "config.json").read_bytes())
        digest.update(self.directory.fingerprint().encode())
        return digest.hexdigest()


class ShardedWeights:
    """A sharded checkpoint. Opening reads the manifest; shards are mapped when they are used.

    Raises:
        CheckpointError: unfinished, incomplete, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest, self.directory = read_manifest(path)
        self.config = self.manifest.model
        self._stored = self.manifest.by_parameter()
        self._files: dict[str, dict[str, Tensor]] = {}
        self._verified: set[int] = set()
        self._lock = threading.Lock()

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type of the elements in the files."""
        return DTYPES[self._stored[parameter.name][0].dtype]

    def stored_tensor(self, entry: StoredTensor) -> Tensor:
        """One tensor of one file, as a view of the mapped file.

        Raises:
            CheckpointError: the file is missing, damaged, or does not hold what the manifest says.
        """
        with self._lock:
            if entry.file not in self._files:
                self._files[entry.file] = load_pickle(stored_path(self.directory, entry.file))
            tensors = self._files[entry.file]
        tensor = tensors.get(entry.key)
        if tensor is None:
            raise CheckpointError(f"{self.directory / entry.file} lacks {entry.key}; the checkpoint is damaged")
        if tuple(tensor.shape) != entry.shape or tensor.dtype != DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{self.directory / entry.file}: {entry.key} is {tensor.dtype} {list(tensor.shape)}; the manifest says "
                f"{entry.dtype} {list(entry.shape)}"
            )
        return tensor

    def pieces(self, parameter: Parameter, tensor: int, rank: int) -> Pieces:
        """One rank's share of a parameter at any degree, out of the shards of this checkpoint's degree."""
        stored, degree = self._stored[parameter.name], self.manifest.tensor
        shards = [parameter.shard(degree, entry.rank) for entry in stored]
        if shards[0] is None:
            found = Pieces((self.stored_tensor(stored[0]),))
        else:
            views = []
            for entry, shard in zip(stored, shards, strict=True):
                assert shard is not None
                views.append(self.stored_tensor(entry).narrow(shard.dim, 0, shard.stop - shard.start))
            found = Pieces(tuple(views), shards[0].dim)
        wanted = parameter.shard(tensor, rank) or whole(parameter)
        return found.narrow(wanted.dim, wanted.start, wanted.stop)

    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        """One rank's share of a parameter, in memory of its own, without vocabulary padding."""
        return self.pieces(parameter, tensor, rank).materialize()

    def verify(self, layer: int) -> None:
        """Compare every stored tensor of a layer with its hash, and replicas with each other.

        Raises:
            CheckpointError: naming the tensor that is damaged or differs between ranks.
        """
        with self.checked(layer):
            pass

    @contextmanager
    def checked(self, layer: int) -> Iterator[Callable[[Tensor], None]]:
        """`verify` beside the reading of a layer: what the function sees in order is not read again.

        Raises:
            CheckpointError: as `verify`, at the end. An error of the caller's about the values (a NaN) gives way to it,
                since damage explains it.
        """
        with self._lock:
            new = layer not in self._verified
            self._verified.add(layer)
        parameters = stored_parameters(self.config, layer) if new else ()
        entries = [entry for parameter in parameters for entry in self._stored[parameter.name]]
        hashes = SourceHashes([self.stored_tensor(entry) for entry in entries])
        try:
            yield hashes.see
        except CheckpointError:
            self._compare(parameters, entries, hashes.finish())
            raise
        self._compare(parameters, entries, hashes.finish())

    def _compare(self, parameters: Sequence[Parameter], entries: Sequence[StoredTensor], found: Sequence[str]) -> None:
        for entry, digest in zip(entries, found, strict=True):
            if digest != entry.hash:
                raise CheckpointError(
                    f"{self.directory / entry.file}: {entry.key} does not match its hash; the file is damaged, use "
                    f"another checkpoint"
                )
        for parameter in parameters:
            copies = {entry.hash for entry in self._stored[parameter.name]}
            if parameter.shard(self.manifest.tensor, 0) is None and len(copies) > 1:
                raise CheckpointError(
                    f"{self.directory}: {parameter.name} should be the same on all {self.manifest.tensor} tensor "
                    f"ranks, but its copies differ; the checkpoint is not consistent"
                )

    def fingerprint(self) -> str:
        """Identifies the content: the manifest holds a hash of every tensor."""
        return xxhash.xxh3_128(manifest_bytes(self.manifest)).hexdigest()


def open_weights(path: Path) -> HfWeights | ShardedWeights:
    """A Hugging Face directory or a sharded checkpoint, whichever is there.

    Raises:
        CheckpointError: neither, or unfinished.
    """
    refuse_partial(path)
    if (path / "config.json").is_file():
        return HfWeights(path)
    return ShardedWeights(path)
