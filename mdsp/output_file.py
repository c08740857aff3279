"""Writing what a command was asked for (`-o FILE`): all of the file or nothing of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_output(path: Path, text: str) -> None:
    """Write a text file. When that fails, what was there before is still there.

    Links keep pointing where they point. What is no regular file (`/dev/stdout`, a named pipe) is written to directly.

    Raises:
        OSError: as the system reports it, about `path`.
    """
    special = path.is_absolute() and path.parts[1:2] in (("dev",), ("proc",))  # perhaps a link to somebody's open file
    target = Path(os.path.realpath(path))
    if special or (target.exists() and not target.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)
