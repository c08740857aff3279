"""How DeepSpeed's engine reads and writes checkpoint files here: safe loading, hashing while writing, no surprises.

All of the engine's checkpoint traffic goes through one object, `engine.checkpoint_engine`. Ours writes every file with
its bytes hashed on the way and fsynced, and reads with an unpickler that builds only what DeepSpeed's own files hold.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from mdsp.checkpoint.hashed_save import hashed_save
from mdsp.checkpoint.manifest import StoredFile
from mdsp.checkpoint.pieces import raw_bytes
from mdsp.errors import CheckpointError

SAFE_CLASSES = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
"""Everything beyond tensors and plain containers that DeepSpeed's optimizer files hold. All are passive records."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as it was written."""

    stored: StoredFile
    """Name, size and hash."""
    tensors: dict[str, tuple[tuple[int, ...], str, str]]
    """Of a layer's file: key -> (shape, type of the elements, hash of their bytes)."""


def tensor_hash(tensor: Tensor) -> str:
    """xxh3_128 of a CPU tensor's raw bytes in row-major order."""
    return xxhash.xxh3_128(raw_bytes(tensor.detach().contiguous().flatten())).hexdigest()


def write_file(state: Any, path: Path, name: str) -> WrittenFile:
    """Save to `path`, hashed on the way and flushed to the disk. OSError when it cannot be written.

    `state` is as `to_host` makes it.
    """
    size, digest = hashed_save(state, path)
    tensors = {}
    if name.startswith("layer_"):
        tensors = {
            key: (tuple(value.shape), str(value.dtype).removeprefix("torch."), tensor_hash(value))
            for key, value in state.items()
        }
    return WrittenFile(StoredFile(file=name, size=size, hash=digest), tensors)


_one_reader = threading.Lock()


@contextmanager
def _safe_classes() -> Iterator[None]:
    # torch keeps one list for all threads, and the first that is done takes the classes off it.
    with _one_reader, torch.serialization.safe_globals(cast(Any, SAFE_CLASSES)):
        yield


def read_file(path: Path, mmap: bool = False) -> Any:
    """What torch.save wrote, onto the CPU, executing nothing.

    Args:
        path: the file.
        mmap: leave tensors in the file until they are touched.

    Raises:
        CheckpointError: the file is missing, damaged, or asks for code to be run.
    """
    try:
        with _safe_classes():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        wanted = next(
            (line for line in reason if "GLOBAL" in line or "Unsupported" in line), reason[-1] if reason else ""
        )
        raise CheckpointError(
            f"{path} was not opened: it is no plain checkpoint file and may hold code to be run ({wanted.strip()})"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged: {text}") from error


def to_host(value: Any, copy: bool) -> Any:
    """The same nest of containers with every tensor on the CPU and owning exactly its own bytes.

    Args:
        value: tensors, dicts, lists and tuples of them, anything else.
        copy: copy also tensors that already are so, because training goes on while they are written.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
        if copy or tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() != tensor.nbytes:
            # A view would be saved with all of its storage: here, a flat buffer of the whole stage.
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            return host.copy_(tensor)
        return tensor
    if isinstance(value, dict):
        return type(value)((key, to_host(item, copy)) for key, item in value.items())
    if isinstance(value, list | tuple) and not hasattr(value, "_fields") and not isinstance(value, torch.Size):
        return type(value)(to_host(item, copy) for item in value)
    return value


class TrainingCheckpointEngine(CheckpointEngine):
    """The engine's reader and writer of checkpoint files.

    A failure to write is kept, not raised: DeepSpeed meets its peers at barriers inside `save_checkpoint`, and a rank
    that left would hang them. Whoever started the save asks `take()`.
    """

    def __init__(self, root: Path | None = None, deferred: bool = False) -> None:
        """root: directory of the checkpoint, for saving. deferred: `save` only takes a copy, `write` writes it."""
        super().__init__()
        self.name = "mdsp"
        self._root = root
        self._deferred = deferred
        self._waiting: list[tuple[Any, Path]] = []
        self.written: list[WrittenFile] = []
        self.failure: OSError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: DeepSpeed need not clone views for us, `to_host` does what is needed."""
        return False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self.failure = self.failure or error

    def save(self, state_dict: Any, path: str) -> None:
        self._waiting.append((to_host(state_dict, copy=self._deferred), Path(path)))
        if not self._deferred:
            self.write()

    def write(self) -> None:
        """Write what `save` has taken; the first failure is kept, and nothing more is written after it."""
        assert self._root is not None
        while self._waiting:
            state, path = self._waiting.pop(0)
            if self.failure is not None:
                continue
            try:
                self.written.append(write_file(state, path, path.relative_to(self._root).as_posix()))
            except OSError as error:
                self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_file(Path(path))


@contextmanager
def checkpoint_engine(engine: Any, replacement: CheckpointEngine) -> Iterator[None]:
    """`engine` reads and writes through `replacement` inside this context."""
    original = engine.checkpoint_engine
    engine.checkpoint_engine = replacement
    try:
        yield
    finally:
        engine.checkpoint_engine = original
