"""How every conversion goes: parts on threads, journaled, into a directory that gets its name when all is there."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mdsp.checkpoint.jobs import default_threads, run_jobs
from mdsp.checkpoint.partial import PartialOutput, give_name, has_no_journal, is_occupied, partial_path, refuse_place
from mdsp.checkpoint.sizes import bytes_in_words
from mdsp.errors import CheckpointError, MdspError


class Progress(Protocol):
    """What a conversion reports while it runs."""

    def start(self, total_bytes: int) -> None:
        """Work begins; this many bytes will be written."""
        ...

    def advance(self, done_bytes: int) -> None:
        """So many more bytes are done; called from several threads."""
        ...


class Silent:
    """No report."""

    def start(self, total_bytes: int) -> None:
        """Nothing."""

    def advance(self, done_bytes: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Job:
    """A part of the output that is written, recorded and taken over as a whole."""

    name: str
    """Its name in the journal."""
    size: int
    """Bytes that it writes, containers aside."""
    write: Callable[[], Any]
    """Writes it; returns what the journal keeps."""
    accept: Callable[[Any], bool]
    """Takes over what an earlier run wrote, given what the journal kept; False when it is not that any more."""


class LayerWriter(Protocol):
    """Writes pipeline layers, in any order, from several threads."""

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer, containers aside."""
        ...

    def write_layer(self, layer: int) -> Any:
        """Write a layer; returns its hashes, for the journal."""
        ...

    def accept_layer(self, layer: int, recorded: Any) -> bool:
        """Take over a layer that an earlier run wrote, if it has the recorded hashes."""
        ...


def layer_jobs(writer: LayerWriter, layers: Sequence[int]) -> list[Job]:
    """A job for each layer of a writer."""

    def job(layer: int) -> Job:
        return Job(
            name=str(layer),
            size=writer.layer_bytes(layer),
            write=lambda: writer.write_layer(layer),
            accept=lambda recorded: writer.accept_layer(layer, recorded),
        )

    return [job(layer) for layer in layers]


class Output(Protocol):
    """What a conversion makes out of an opened source."""

    plan: dict[str, Any]
    """Identifies the work: source, degrees, types."""
    parameters: int
    """Parameters of the model."""
    left_aside: tuple[str, ...]
    """Tensors of the source that are no parameters."""
    verified: str
    """What is checked while it is made, in words."""
    optimizer_state: str
    """What becomes of the optimizer state, in words; empty when the source has none."""

    def prepare(self, directory: Path, advance: Callable[[int], None]) -> list[Job]:
        """The parts, to be written below `directory`."""
        ...

    def open(self) -> None:
        """Called when there is room for the parts, and before any of them."""
        ...

    def finish(self, directory: Path) -> tuple[str, ...]:
        """Write what comes after the parts and make all of it durable; returns the files carried along."""
        ...

    def close(self) -> None:
        """Called at the end, however it comes."""
        ...

    def difference(self, directory: Path, progress: Progress, threads: int) -> str | None:
        """How a finished directory differs from what this conversion makes, None when it is just that, and whole."""
        ...


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    out: Path
    parameters: int
    """Parameters of the model, each read once."""
    complete_before: bool
    """The same conversion had been finished before: it was compared, and nothing written."""
    written_bytes: int
    """Bytes of tensors in the output, those of an earlier run included."""
    parts: int
    """Pieces of work: pipeline layers, and parameters' optimizer states."""
    resumed_parts: int
    """Those that an earlier, interrupted run had finished; compared with their hashes."""
    left_aside: tuple[str, ...]
    """Tensors of the source that are no parameters: masks, rotary frequencies, copies of a tied head."""
    carried: tuple[str, ...]
    """Tokenizer and configuration files."""
    optimizer_state: str
    """What became of the optimizer state, in words; empty when the source has none."""
    verified: str
    """What was checked, in words."""


def make(out: Path, output: Output, progress: Progress | None, threads: int | None) -> Summary:
    """Make `output` at `out`, or go on where an earlier run of the same conversion stopped, or find it complete.

    Raises:
        MdspError: the source cannot be converted (what was written of it is removed), or something else is in the way.
        OSError: the disk is full or the like; the same call continues where this one stopped.
    """
    progress, threads = progress or Silent(), threads or default_threads()
    refuse_place(out)
    if _made_before(out, output, progress, threads):
        return _summary(out, output, True, [], 0, ())
    with PartialOutput(out, output.plan) as partial:
        with _removed_when_refused(partial):
            jobs = output.prepare(partial.path, progress.advance)
        total = sum(job.size for job in jobs)
        _require_space(partial.path, total, _disk_usage(partial.path))
        progress.start(total)
        with _removed_when_refused(partial):
            try:
                output.open()
                resumed = _carry_out(jobs, partial, progress, threads)
                carried = output.finish(partial.path)
            finally:
                output.close()
        partial.finish()
    return _summary(out, output, False, jobs, resumed, carried)


def _summary(
    out: Path, output: Output, complete_before: bool, jobs: Sequence[Job], resumed: int, carried: tuple[str, ...]
) -> Summary:
    return Summary(
        out=out,
        parameters=output.parameters,
        complete_before=complete_before,
        written_bytes=sum(job.size for job in jobs),
        parts=len(jobs),
        resumed_parts=resumed,
        left_aside=output.left_aside,
        carried=carried,
        optimizer_state=output.optimizer_state,
        verified=output.verified,
    )


def _made_before(out: Path, output: Output, progress: Progress, threads: int) -> bool:
    """Whether an earlier run of the same conversion has finished its work, and perhaps only not named it."""
    if is_occupied(out):
        reason = output.difference(out, progress, threads) if out.is_dir() else "it is a file"
        if reason is not None:
            raise CheckpointError(
                f"{out} exists already, and is not what this command makes ({reason}); choose another output, or "
                f"remove it"
            )
        return True
    if not has_no_journal(out) or output.difference(partial_path(out), progress, threads) is not None:
        return False  # what is there instead, the making itself will say
    give_name(out)
    return True


@contextmanager
def _removed_when_refused(partial: PartialOutput) -> Iterator[None]:
    """The source is to blame for a refusal: nothing of this output can be used."""
    try:
        yield
    except MdspError:
        partial.discard()
        raise


def _carry_out(jobs: Sequence[Job], partial: PartialOutput, progress: Progress, threads: int) -> int:
    """Do what an earlier run did not finish; returns how many jobs it had."""
    accepted = []
    lock = threading.Lock()

    def carry_out(index: int) -> None:
        job = jobs[index]
        recorded = partial.finished.get(job.name)
        if recorded is not None and job.accept(recorded):
            progress.advance(job.size)
            with lock:
                accepted.append(job.name)
            return
        partial.record(job.name, job.write())

    run_jobs(range(len(jobs)), carry_out, threads)
    return len(accepted)


def _require_space(directory: Path, need: int, present: int) -> None:
    free = shutil.disk_usage(directory).free
    if need - present > free:
        raise CheckpointError(
            f"{directory} has {bytes_in_words(free)} free, the output needs {bytes_in_words(need - present)} more; "
            f"make room or choose another output"
        )


def _disk_usage(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
