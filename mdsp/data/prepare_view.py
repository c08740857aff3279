"""What `mdsp prepare` shows: a progress bar on a terminal, a summary table everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from mdsp.data.sidecar import sidecar_path
from mdsp.data.tokenise import Progress as Report

if TYPE_CHECKING:
    from mdsp.data.prepare import Prepared


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A callback that shows progress on standard error when that is a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        current = "reading"

        def report(what: str, done: int, total: int) -> None:
            nonlocal current
            if what != current:
                bar.reset(task, description=what)
                current = what
            bar.update(task, completed=done, total=total or None)

        yield report


def print_summary(output: str, prepared: Prepared) -> None:
    """Print what was written, on standard output."""
    facts = prepared.facts
    table = Table(show_header=True, box=None)
    table.add_column("")
    splits = [facts.train] + ([facts.valid] if facts.valid else [])
    for split in splits:
        table.add_column(split.name, justify="right")
    table.add_row("documents", *(f"{split.documents:,}" for split in splits))
    table.add_row("tokens", *(f"{split.tokens:,}" for split in splits))
    table.add_row("bytes of text", *(f"{split.text_bytes:,}" for split in splits))
    table.add_row("bytes per token", *(f"{split.text_bytes / split.tokens:.2f}" for split in splits))
    # Wider than a pipe's default 80 columns, so that paths are not broken in log files
    console = Console(soft_wrap=True)
    console.print(table)
    tokens = sum(split.tokens for split in splits)
    tokenizer = sidecar_path(output).parent / facts.tokenizer
    separator = f"{facts.end_of_document} (id {facts.end_of_document_id})"
    lines = [
        f"written            {', '.join(f'{_beside(output, split.name)}.bin/.idx' for split in splits)}",
        f"described in       {sidecar_path(output)}",
        f"tokenizer          {tokenizer}: {facts.vocab_size:,} tokens, {separator} after each document",
        f"unigram entropy    {facts.unigram_entropy_nats:.4f} nats (a training loss below it uses context)",
        f"tokenising         {tokens / max(prepared.seconds, 1e-9):,.0f} tokens/s, {prepared.seconds:.1f} s",
        f"skipped            {prepared.skipped.describe()}",
        *(f"note               {note}" for note in prepared.notes),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _beside(output: str, name: str) -> str:
    return output[: output.rfind("/") + 1] + name
