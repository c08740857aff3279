"""Checkpoints: file layout and manifest, Hugging Face import and export, other degrees, comparison."""
