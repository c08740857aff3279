"""mdsp: 3D-parallel training of GPT models on DeepSpeed, from one JSON file."""

__version__ = "0.1.0"
