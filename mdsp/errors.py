"""The errors that a user can cause and can mend: one short message, no traceback, non-zero exit."""

from __future__ import annotations


class MdspError(Exception):
    """Base of every error that mdsp raises on purpose.

    The message says what is wrong, with which value, what the rule is, and the way out. `exit_code` is what the
    command line exits with.
    """

    exit_code = 1


class ConfigError(MdspError):
    """A configuration key, a command-line value, or a combination of them is not legal."""

    exit_code = 2


class CheckpointError(MdspError):
    """A checkpoint is missing, incomplete, damaged, hostile, or not the model that was asked for."""

    exit_code = 2


class DataError(MdspError):
    """A corpus, a tokenizer or a tokenised dataset cannot be used."""

    exit_code = 2


class TrainingError(MdspError):
    """Training had to stop: diverging loss, repeated overflow, a lost rank."""
