"""Rotary fields of `config.json`, old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`), both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdsp.families.fields import HfConfig
from mdsp.model.config import ModelConfig, RopeScaling

_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor"),
}


def read_rope(
    hf: HfConfig,
    options: dict[str, Any],
    kinds: tuple[str, ...] = ("linear", "llama3", "yarn"),
    theta_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
    fraction: float = 1.0,
) -> None:
    """Set `rotary_base`, `rotary_dim` and `rope_scaling` in `options`, which must already hold the head sizes.

    `kinds` are the scalings that the family's `transformers` model computes; `fraction` is the part of each head that
    is rotated when the file does not say.

    Raises:
        ConfigError: a scaling of another kind, or a scaling field that is not understood, by name.
    """
    old, new = hf.get("rope_scaling"), hf.get("rope_parameters")
    if old is not None and new is not None and old != new:
        raise hf.refuse("rope_scaling", f"contradicts rope_parameters = {new!r}; keep the right one")
    key = "rope_scaling" if old is not None else "rope_parameters"
    given = dict(old or new or {})
    theta, share = hf.get(theta_key, 10000.0), hf.get(fraction_key, fraction)
    theta = given.pop("rope_theta", None) or theta
    part = given.pop("partial_rotary_factor", None)
    share = share if part is None else part
    head_dim = options.get("head_dim") or options["hidden_size"] // options["n_heads"]
    options["rotary_base"] = float(theta)
    options["rotary_dim"] = int(head_dim * share)
    if options["rotary_dim"] < 2:
        raise hf.refuse(key, f"{share} of a head of {head_dim} leaves no pair of dimensions to rotate")
    named, typed = given.pop("rope_type", None), given.pop("type", None)
    if named is not None and typed is not None and named != typed:
        raise hf.refuse(key, "rope_type and type differ; keep the right one")
    kind = named or typed or "default"
    if kind == "mrope":
        raise hf.refuse(key, "multimodal rotary positions are not supported")
    if kind == "default":
        given.pop("original_max_position_embeddings", None)
        given.pop("factor", None)
        if given:
            raise hf.refuse(key, f"rotary fields {sorted(given)} are not known")
        return
    if kind not in kinds:
        raise hf.refuse(key, f"rotary scaling of type {kind!r} is not supported for this family; {_listed(kinds)}")
    scaling: dict[str, Any] = {"kind": kind, "factor": given.pop("factor", None)}
    if scaling["factor"] is None:
        raise hf.refuse(key, "factor is missing")
    original = given.pop("original_max_position_embeddings", None)
    if kind != "linear":
        scaling["original_max_positions"] = original or options["max_positions"]
    for name in _SCALING_FIELDS[kind]:
        value = given.pop(name, None)
        if value is not None:
            scaling[name] = float(value)
        elif kind == "llama3":
            raise hf.refuse(key, f"{name} is missing")
    if given.pop("truncate", True) is not True:
        raise hf.refuse(key, "truncate = false is not supported")
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        raise hf.refuse(key, f"rotary fields {sorted(given)} are not known for type {kind!r}")
    options["rope_scaling"] = RopeScaling.model_validate(scaling)


def _listed(kinds: tuple[str, ...]) -> str:
    return f"supported are {', '.join(kinds)}" if kinds else "it computes unscaled rotary positions only"


def write_rope(config: ModelConfig, values: dict[str, Any], fraction_always: bool = False) -> None:
    """Write `rope_parameters`, and the top-level fields that `transformers` before version 5 reads in their place.

    `fraction_always` writes `partial_rotary_factor` also where all dimensions are rotated, for classes whose own
    default is another.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    scaling = config.rope_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.original_max_positions is not None:
            parameters["original_max_position_embeddings"] = scaling.original_max_positions
        for name in _SCALING_FIELDS[scaling.kind]:
            if getattr(scaling, name) is not None:
                parameters[name] = getattr(scaling, name)
    if fraction_always or config.rotary_dim != config.head_dim:
        parameters["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    values["rope_parameters"] = parameters
    values["rope_theta"] = config.rotary_base
    if scaling is not None:
        values["rope_scaling"] = parameters
    if "partial_rotary_factor" in parameters:
        values["partial_rotary_factor"] = parameters["partial_rotary_factor"]


def quarter_rotary(options: dict[str, Any]) -> dict[str, Any]:
    """The rotary default of GPT-NeoX and StableLM: the first quarter of each head is rotated."""
    heads, hidden = options.get("n_heads"), options.get("hidden_size")
    head_dim = options.get("head_dim")
    if not head_dim and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    return {"rotary_dim": int(head_dim) // 4} if head_dim else {}
