"""Named models as `ModelConfig`: published shapes, so that a plan needs nothing but a name."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsp.errors import ConfigError
from mdsp.model.config import ModelConfig, RopeScaling
from mdsp.model.table import parameter_table


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"family": "gpt2", "n_layers": layers, "hidden_size": hidden, "n_heads": heads, "vocab_size": 50257,
            "max_positions": 1024}  # fmt: skip


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Brown et al. 2020, table 2.1, with 16 heads at 1.3B and width 5120 at 13B: the printed ones do not multiply."""
    return {**_gpt2(layers, hidden, heads), "max_positions": 2048}


def _megatron(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Narayanan et al. 2021, table 1: GPT with a vocabulary padded to 51,200 and 2,048 positions."""
    return {**_gpt2(layers, hidden, heads), "vocab_size": 51200, "max_positions": 2048}


def _llama(layers: int, hidden: int, heads: int, ffn: int, kv: int = 0, vocab: int = 32000, positions: int = 4096,
           base: float = 10000.0, tied: bool = False, scaling: float | None = None) -> dict[str, Any]:  # fmt: skip
    return {
        "family": "llama", "n_layers": layers, "hidden_size": hidden, "n_heads": heads, "n_kv_heads": kv,
        "ffn_size": ffn, "vocab_size": vocab, "max_positions": positions, "norm": "rmsnorm", "position": "rotary",
        "rotary_base": base, "activation": "silu", "gated_mlp": True, "qkv_bias": False, "attention_output_bias": False,
        "mlp_bias": False, "tied_head": tied,
        "rope_scaling": scaling and RopeScaling(kind="llama3", factor=scaling, original_max_positions=8192),
    }  # fmt: skip


def _bloom(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """BLOOM (BigScience 2022): ALiBi, a norm after the embedding, tied head, 250,880 rows."""
    return {"family": "bloom", "n_layers": layers, "hidden_size": hidden, "n_heads": heads, "vocab_size": 250880,
            "max_positions": 2048, "position": "alibi", "embedding_norm": True}  # fmt: skip


def _neox(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """GPT-NeoX and Pythia: parallel residual, rotary on a quarter of each head, untied head."""
    return {"family": "gpt_neox", "n_layers": layers, "hidden_size": hidden, "n_heads": heads, "vocab_size": 50432,
            "max_positions": 2048, "position": "rotary", "rotary_dim": hidden // heads // 4, "residual": "parallel",
            "activation": "gelu", "tied_head": False}  # fmt: skip


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"family": "opt", "n_layers": layers, "hidden_size": hidden, "n_heads": heads, "vocab_size": 50272,
            "max_positions": 2048, "position_offset": 2, "activation": "relu"}  # fmt: skip


_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18b": _megatron(40, 6144, 48),
    "megatron-22b": _megatron(48, 6144, 64),
    "megatron-39b": _megatron(48, 8192, 64),
    "megatron-76b": _megatron(60, 10240, 80),
    "megatron-145b": _megatron(80, 12288, 96),
    "megatron-310b": _megatron(96, 16384, 128),
    "mt-nlg-530b": _megatron(105, 20480, 128),
    "megatron-1t": _megatron(128, 25600, 160),
    "gpt-neox-20b": _neox(44, 6144, 64),
    "opt-175b": _opt(96, 12288, 96),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-7b": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "llama-7b": _llama(32, 4096, 32, 11008, positions=2048),
    "llama-13b": _llama(40, 5120, 40, 13824, positions=2048),
    "llama-30b": _llama(60, 6656, 52, 17920, positions=2048),
    "llama-65b": _llama(80, 8192, 64, 22016, positions=2048),
    "llama2-7b": _llama(32, 4096, 32, 11008),
    "llama2-13b": _llama(40, 5120, 40, 13824),
    "llama2-70b": _llama(80, 8192, 64, 28672, 8),
    "llama3-8b": _llama(32, 4096, 32, 14336, 8, 128256, 8192, 500000.0),
    "llama3-70b": _llama(80, 8192, 64, 28672, 8, 128256, 8192, 500000.0),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, 8, 128256, 131072, 500000.0, scaling=8.0),
    "llama3.1-70b": _llama(80, 8192, 64, 28672, 8, 128256, 131072, 500000.0, scaling=8.0),
    "llama3-405b": _llama(126, 16384, 128, 53248, 8, 128256, 131072, 500000.0, scaling=8.0),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, 8, 128256, 131072, 500000.0, tied=True, scaling=32.0),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, 8, 128256, 131072, 500000.0, tied=True, scaling=32.0),
    "mistral-7b": {**_llama(32, 4096, 32, 14336, 8, positions=32768), "family": "mistral", "sliding_window": 4096},
    "qwen2-72b": {**_llama(80, 8192, 64, 29568, 8, 152064, 32768, 1000000.0), "family": "qwen2", "qkv_bias": True},
}
_ALIASES = {"gpt3": "gpt3-175b", "bloom": "bloom-176b", "llama3.1-405b": "llama3-405b", "megatron-530b": "mt-nlg-530b"}


@dataclass(frozen=True)
class NamedModel:
    """A model to plan for, and where it comes from."""

    name: str
    config: ModelConfig
    section: dict[str, Any]
    """The "model" section of a configuration that trains it."""
    stated_parameters: float | None = None
    """A bare number of parameters that was asked for; sizes of weights and states are then of this number."""

    @property
    def parameters(self) -> float:
        """Number of parameters: as stated, or of the table."""
        return self.stated_parameters or parameter_table(self.config).numel


def model_names() -> tuple[str, ...]:
    """The models known by name."""
    return tuple(_SHAPES)


def named_model(name: str) -> ModelConfig:
    """The model of that name; raises `ConfigError` listing near names."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in _SHAPES:
        near = difflib.get_close_matches(key, [*_SHAPES, *_ALIASES], n=4, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ConfigError(f"unknown model {name!r}{hint}. Known: {', '.join(_SHAPES)}")
    return ModelConfig(**_SHAPES[key])


def find_model(text: str) -> NamedModel:
    """The model that `--model` means: a known name, a Hugging Face directory, a JSON file, or a size such as `530B`.

    The file is an mdsp configuration (its "mdsp.model" is used), or just that section. A size takes the published GPT
    shape nearest to it. Raises `ConfigError`.
    """
    path = Path(text)
    if path.is_dir():
        from mdsp.families import model_config_from_hf

        return NamedModel(path.name, model_config_from_hf(path), {"from_hf": str(path)})
    if text.endswith(".json") or path.is_file():
        return _from_json(path)
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([bBtTmM])", text.strip()):
        wanted = float(size[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[2].lower()]
        if not 0 < wanted < math.inf:
            raise ConfigError(f"--model {text}: a model has parameters, and not infinitely many; for example 530B")
        return _of_size(text.strip(), wanted)
    config = named_model(text)
    return NamedModel(text.lower(), config, _section(config))


def _section(config: ModelConfig) -> dict[str, Any]:
    """The section of a configuration file: what is required, and what differs from the family's own choices."""
    from mdsp.families import get_family

    values = config.model_dump()
    required = {name: values[name] for name, field in ModelConfig.model_fields.items() if field.is_required()}
    section = {"family": config.family, **required}
    # The defaults of some options depend on others, so one pass may uncover another difference.
    for _ in range(2):
        default = get_family(config.family).model_config(section).model_dump()
        section.update({name: value for name, value in values.items() if default[name] != value})
    return section


def _of_size(text: str, wanted: float) -> NamedModel:
    shapes = {n: ModelConfig(**s) for n, s in _SHAPES.items() if n.startswith(("gpt2", "gpt3", "megatron", "mt-nlg"))}
    counts = {n: parameter_table(c).numel for n, c in shapes.items()}
    nearest = min(counts, key=lambda n: abs(counts[n] / wanted - 1))
    if abs(counts[nearest] / wanted - 1) > 0.25:
        raise ConfigError(
            f"--model {text}: the nearest published GPT shape is {nearest} with {counts[nearest] / 1e9:.4g} B "
            f"parameters, which is too far off; give a JSON file with the shape"
        )
    return NamedModel(f"{text} (shape of {nearest})", shapes[nearest], _section(shapes[nearest]), wanted)


def _from_json(path: Path) -> NamedModel:
    from mdsp.config.model_section import resolve_model
    from mdsp.config.problems import refuse
    from mdsp.config.read import read_json
    from mdsp.families import model_config_from_hf

    document = read_json(path)
    if "model_type" in document:
        return NamedModel(path.parent.name, model_config_from_hf(path.parent), {"from_hf": str(path.parent)})
    inner = document.get("mdsp")
    section = inner.get("model") if isinstance(inner, dict) else document
    if not isinstance(section, dict):
        raise ConfigError(f'{path}: has no "mdsp": {{"model": ...}} section, which says what the model is')
    config, problems = resolve_model(section)
    refuse(str(path), problems)
    assert config is not None
    return NamedModel(path.stem, config, dict(section))
