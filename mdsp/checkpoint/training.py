"""Checkpoints of training: save, find, load. What `train.py` needs, in one place."""

from __future__ import annotations

from mdsp.checkpoint.counters import Counters
from mdsp.checkpoint.resume import Found, find_checkpoint, load_training_checkpoint
from mdsp.checkpoint.saving import PendingSave, save_training_checkpoint

__all__ = [
    "Counters",
    "Found",
    "PendingSave",
    "find_checkpoint",
    "load_training_checkpoint",
    "save_training_checkpoint",
]
