"""Family: everything that mdsp knows of one Hugging Face model type, and what follows from it in both directions."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mdsp.errors import ConfigError
from mdsp.families.fields import ACTIVATIONS, Field, HfConfig
from mdsp.families.tensors import Module, TensorMap, expand
from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table

ReadHook = Callable[[HfConfig, dict[str, Any]], None]
WriteHook = Callable[[ModelConfig, dict[str, Any]], None]

# Options that change training noise or new weights only: a family without a field for them may drop them on export.
_NOT_EXPORTED = frozenset({"embedding_dropout", "hidden_dropout", "attention_dropout", "init_std"})


@dataclass(frozen=True, eq=False)
class Family:
    """One Hugging Face model type, declared. All methods are generic."""

    name: str
    """Name in `ModelConfig.family`; the same as `model_type` in `config.json`."""
    architecture: str
    """Class that an export names, e.g. `LlamaForCausalLM`."""
    base_architectures: tuple[str, ...]
    """Further classes whose files hold the same tensors, e.g. `LlamaModel`."""
    defaults: Mapping[str, Any]
    """ModelConfig options of this family, for a model described as `{"family": ..., "n_layers": ...}`."""
    fields: tuple[Field, ...]
    """Fields of `config.json` that hold one option each."""
    prefix: str
    """What the names of all tensors but the head's begin with, and what files of the base model leave out."""
    embedding: tuple[Module, ...]
    """Modules before the blocks; the token embedding first."""
    block_prefix: str
    """Name of block `{}` below `prefix`, with a final dot."""
    block: tuple[Module, ...]
    """Modules of one block; table names without `blocks.N.`."""
    final: tuple[Module, ...]
    """Modules after the blocks and before the head."""
    head: str
    """Module of the vocabulary head, without prefix; in tied models its weight is a copy of the embedding's."""
    read: ReadHook | None = None
    """Reads the fields of `config.json` that are not one option each, and refuses what is not computed."""
    write: WriteHook | None = None
    """Writes them."""
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Options that follow from others, for `model_config`."""
    buffers: tuple[str, ...] = ()
    """Patterns of tensors that old files hold and that are no parameters (masks, rotary frequencies)."""
    activation_name: str = "gelu_new"
    """The name under which this family writes the tanh approximation of GELU."""

    @property
    def model_type(self) -> str:
        """`model_type` in `config.json`."""
        return self.name

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes whose files are read."""
        return (self.architecture, *self.base_architectures)

    def model_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """A ModelConfig from this family's defaults and the given options (those of the JSON configuration).

        Raises:
            ConfigError: an unknown option, a wrong type, or options that do not go together.
        """
        options = {**self.defaults, "family": self.name}
        if self.derive is not None:
            options |= self.derive({**options, **values})
        return self._validate({**options, **values})

    def _validate(self, options: Mapping[str, Any]) -> ModelConfig:
        try:
            return ModelConfig.model_validate(dict(options))
        except ValidationError as error:
            raise self._refusal(error.errors()[0]) from None

    def _refuse_bad_values(self, options: Mapping[str, Any]) -> None:
        """Refuse options that are wrong by themselves, before anything is computed with them."""
        try:
            ModelConfig.model_validate(dict(options))
        except ValidationError as error:
            for problem in error.errors():
                if problem["loc"] and problem["loc"][0] in options:  # others may still be to come
                    raise self._refusal(problem) from None

    def _refusal(self, problem: ErrorDetails) -> ConfigError:
        where, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        if not where:  # options that do not go together; the message names them
            return ConfigError(f"{self.name} model: {message}")
        return ConfigError(f"{self.name} model, {where}: {message} (given: {problem.get('input')!r})")

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """The model that a `config.json` describes.

        Raises:
            ConfigError: a field is missing, not understood, or asks for something that mdsp does not compute.
        """
        reader = HfConfig(self.name, hf)
        named = reader.get("architectures", [])
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise reader.refuse("architectures", f"must be a list of names, such as [{self.architecture!r}]")
        if named and not {one.casefold() for one in named} & {one.casefold() for one in self.architectures}:
            raise reader.refuse("architectures", f"not a causal language model of this family ({self.architecture})")
        options: dict[str, Any] = {**self.defaults, "family": self.name}
        for field in self.fields:
            value = reader.read(field)
            if value is not None:
                options |= dict.fromkeys(field.options, value)
        if self.read is not None:
            self._refuse_bad_values(options)
            with reader.understood():
                self.read(reader, options)
        reader.finish()
        return self._validate(options)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """The `config.json` of a model, as a dictionary.

        Raises:
            ConfigError: the model has an option that this family cannot express.
        """
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for field in self.fields:
            value = getattr(config, field.options[0])
            if "activation" in field.options:
                value = self._activation(value)
            values[field.hf] = value
        if self.write is not None:
            self.write(config, values)
        back = self.config_from_hf(values)
        for name in ModelConfig.model_fields:
            ignored = name in _NOT_EXPORTED or (name == "max_positions" and config.position in ("alibi", "none"))
            if not ignored and not _same(_effective(config, name), _effective(back, name)):
                raise ConfigError(
                    f"a model with {name} = {getattr(config, name)!r} cannot be written as {self.name}, which would "
                    f"read it as {getattr(back, name)!r}; choose another family"
                )
        return values

    def _activation(self, function: str) -> str:
        if function == "gelu_tanh":
            return self.activation_name
        return next(name for name, meaning in ACTIVATIONS.items() if meaning == function)

    def tensors(self, config: ModelConfig) -> tuple[TensorMap, ...]:
        """Every Hugging Face tensor of a model with the parameters it holds; each parameter lies in exactly one."""
        return _tensors(self, config)

    def buffer(self, name: str) -> bool:
        """Whether a tensor of a file is one that is no parameter and is computed anew (masks, rotary frequencies)."""
        return any(re.search(pattern, name) for pattern in self.buffers)

    def tied_copy(self, config: ModelConfig) -> str | None:
        """Name under which files of a tied model may repeat the token embedding; None when the head is its own."""
        return f"{self.head}.weight" if config.tied_head else None


@functools.lru_cache(maxsize=32)
def _tensors(family: Family, config: ModelConfig) -> tuple[TensorMap, ...]:
    table = parameter_table(config)
    heads = config.n_heads
    maps = list(expand(family.embedding, table, heads, family.prefix))
    for index in range(config.n_layers):
        prefix = family.prefix + family.block_prefix.format(index)
        maps += expand(family.block, table, heads, prefix, f"blocks.{index}.")
    maps += expand(family.final, table, heads, family.prefix)
    maps += expand((Module(family.head, ("head",)),), table, heads)
    held = [piece.parameter.name for entry in maps for piece in entry.pieces]
    missing = [parameter.name for parameter in table if parameter.name not in set(held)]
    if missing or len(set(held)) != len(held):
        raise ConfigError(
            f"a model with the parameter {missing[0] if missing else held!r} cannot be written as {family.name}, which "
            f"has no tensor for it; choose another family"
        )
    return tuple(maps)


def _effective(config: ModelConfig, name: str) -> Any:
    """The value of an option, where "not given" means what the model then computes."""
    value = getattr(config, name)
    return config.head_dim**-0.5 if name == "attention_scale" and value is None else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=0.0)
    return bool(a == b)
