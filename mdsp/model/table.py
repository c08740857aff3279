"""The parameter table: every parameter of the model, once. Modules, initial weights, conversion, counts follow from it.

No torch here: the planner and the configuration checks read the table too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from mdsp.model.config import ModelConfig

# Pipeline layers before the first block: the token embedding (alone, because it may be tied), then what follows it.
TOKEN_EMBEDDING_LAYER = 0
POSITION_LAYER = 1
FIRST_BLOCK_LAYER = 2


class PartialGrad(Enum):
    """When the gradient that one tensor-parallel rank computes for a replicated parameter is only a part of the sum."""

    NEVER = "never"
    SEQUENCE_PARALLEL = "sequence_parallel"  # each rank sees its own slice of the sequence
    ALWAYS = "always"  # each rank uses the parameter for its own heads only


@dataclass(frozen=True, slots=True)
class Init:
    """How a new parameter is drawn: a constant, or normal with mean 0 when `std` is not 0."""

    std: float = 0.0
    constant: float = 0.0


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows (or columns) `start:stop` of dimension `dim` that one rank holds, then `padding` rows of zeros."""

    dim: int
    start: int
    stop: int
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole, unsharded model."""

    name: str
    """Unique name, e.g. `blocks.3.attention.query.weight`."""
    layer: int
    """Pipeline layer that owns it (see `pipeline_layer_count`)."""
    attribute: str
    """Its dotted name inside that layer's module, e.g. `attention.query.weight`."""
    shape: tuple[int, ...]
    """Unsharded shape, `[out, in]` for matrices; vocabulary rows are the true ones, without padding."""
    init: Init
    decay: bool
    """Whether weight decay applies."""
    split_dim: int | None = None
    """Dimension that tensor parallelism splits; None: replicated."""
    units: int = 1
    """Indivisible pieces along `split_dim`: heads, key/value heads, FFN columns."""
    optional_split: bool = False
    """Replicated, not refused, where `units` is not a multiple of the degree (key/value heads)."""
    padded_rows: int = 0
    """Vocabulary parameters: rows after padding, at every layout; 0 elsewhere."""
    partial_grad: PartialGrad = PartialGrad.NEVER
    tied_layers: tuple[int, ...] = ()
    """Further pipeline layers that use the same weight."""

    @property
    def numel(self) -> int:
        """True number of elements, without padding."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    def is_split(self, tensor: int) -> bool:
        """Whether the ranks of a tensor-parallel group of this degree hold different pieces."""
        if self.split_dim is None or tensor == 1:
            return False
        return not (self.optional_split and self.units % tensor)

    def has_partial_grad(self, tensor: int, sequence_parallel: bool) -> bool:
        """Whether gradients must be summed over the tensor-parallel group before they are used."""
        if tensor == 1 or self.is_split(tensor):
            return False
        if self.optional_split and self.split_dim is not None:
            return True  # a replicated key/value head: each rank's queries reach only some of them
        return self.partial_grad is PartialGrad.ALWAYS or (
            self.partial_grad is PartialGrad.SEQUENCE_PARALLEL and sequence_parallel
        )

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Shape that one tensor-parallel rank holds, vocabulary padding included."""
        shape = list(self.shape)
        if self.padded_rows:
            shape[0] = -(-self.padded_rows // tensor)
        elif self.is_split(tensor):
            assert self.split_dim is not None
            shape[self.split_dim] //= tensor
        return tuple(shape)

    def shard(self, tensor: int, rank: int) -> Shard | None:
        """The piece of the unsharded parameter that `rank` holds, or None when it holds all of it unchanged."""
        if self.padded_rows:
            rows = -(-self.padded_rows // tensor)
            start, stop = min(rank * rows, self.shape[0]), min((rank + 1) * rows, self.shape[0])
            return Shard(0, start, stop, rows - (stop - start))
        if not self.is_split(tensor):
            return None
        assert self.split_dim is not None
        length = self.shape[self.split_dim] // tensor
        return Shard(self.split_dim, rank * length, (rank + 1) * length)


@dataclass(frozen=True)
class ParameterTable:
    """All parameters of a model, in pipeline order."""

    config: ModelConfig
    parameters: tuple[Parameter, ...]

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    @functools.cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.parameters}

    @functools.cached_property
    def by_layer(self) -> dict[int, tuple[Parameter, ...]]:
        """Parameters that each pipeline layer holds a copy of: its own, and those tied into it."""
        layers: dict[int, list[Parameter]] = {i: [] for i in range(pipeline_layer_count(self.config))}
        for p in self.parameters:
            for layer in (p.layer, *p.tied_layers):
                layers[layer].append(p)
        return {layer: tuple(owned) for layer, owned in layers.items()}

    @functools.cached_property
    def numel(self) -> int:
        """Number of parameters of the model: tied ones once, no padding."""
        return sum(p.numel for p in self.parameters)

    def layer_numel(self, layer: int, tensor: int = 1) -> int:
        """Elements that one tensor-parallel rank really holds for a pipeline layer, padding and tied copies included."""
        total = 0
        for p in self.by_layer[layer]:
            size = 1
            for length in p.local_shape(tensor):
                size *= length
            total += size
        return total


def pipeline_layer_count(config: ModelConfig) -> int:
    """Pipeline layers: token embedding, position layer, the blocks, final norm, vocabulary head."""
    return config.n_layers + 4


def final_norm_layer(config: ModelConfig) -> int:
    return config.n_layers + 2


def head_layer(config: ModelConfig) -> int:
    return config.n_layers + 3


def _norm(config: ModelConfig, prefix: str, layer: int, attribute: str, size: int, bias: bool) -> list[Parameter]:
    common = dict(layer=layer, shape=(size,), decay=False, partial_grad=PartialGrad.SEQUENCE_PARALLEL)
    one = Init(constant=0.0 if config.norm_unit_offset else 1.0)
    found = [Parameter(name=f"{prefix}.weight", attribute=f"{attribute}.weight", init=one, **common)]  # type: ignore[arg-type]
    if bias:
        found.append(Parameter(name=f"{prefix}.bias", attribute=f"{attribute}.bias", init=Init(), **common))  # type: ignore[arg-type]
    return found


def _block(config: ModelConfig, index: int) -> list[Parameter]:
    layer = FIRST_BLOCK_LAYER + index
    hidden, ffn = config.hidden_size, config.ffn_size
    query, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    normal = Init(std=config.init_std)
    into_residual = Init(std=config.init_std / (2 * config.n_layers) ** 0.5)
    has_norm_bias = config.norm == "layernorm" and config.norm_bias
    found: list[Parameter] = []

    def norm(attribute: str) -> None:
        found.extend(_norm(config, f"blocks.{index}.{attribute}", layer, attribute, hidden, has_norm_bias))

    def column(attribute: str, out: int, bias: bool, units: int, optional: bool = False) -> None:
        """Split along the outputs: `[out / tp, in]`, bias `[out / tp]`."""
        name = f"blocks.{index}.{attribute}"
        split = dict(layer=layer, split_dim=0, units=units, optional_split=optional)
        found.append(Parameter(f"{name}.weight", attribute=f"{attribute}.weight", shape=(out, hidden), init=normal, decay=True, **split))  # type: ignore[arg-type]
        if bias:
            found.append(Parameter(f"{name}.bias", attribute=f"{attribute}.bias", shape=(out,), init=Init(), decay=False, **split))  # type: ignore[arg-type]

    def row(attribute: str, inputs: int, bias: bool, units: int) -> None:
        """Split along the inputs: `[out, in / tp]`; the bias is whole on every rank and added once."""
        name = f"blocks.{index}.{attribute}"
        found.append(Parameter(f"{name}.weight", layer, f"{attribute}.weight", (hidden, inputs), into_residual, True, split_dim=1, units=units))
        if bias:
            found.append(Parameter(f"{name}.bias", layer, f"{attribute}.bias", (hidden,), Init(), False, partial_grad=PartialGrad.SEQUENCE_PARALLEL))

    if config.norm_placement in ("pre", "sandwich"):
        norm("attention_norm")
    column("attention.query", query, config.qkv_bias, config.n_heads)
    column("attention.key", kv, config.qkv_bias, config.n_kv_heads, optional=True)
    column("attention.value", kv, config.qkv_bias, config.n_kv_heads, optional=True)
    if config.qk_norm == "head":
        for which in ("query_norm", "key_norm"):
            attribute = f"attention.{which}.weight"
            found.append(Parameter(f"blocks.{index}.{attribute}", layer, attribute, (config.head_dim,), Init(constant=1.0), False, partial_grad=PartialGrad.ALWAYS))
    elif config.qk_norm == "full":
        for which, size, units in (("query_norm", query, config.n_heads), ("key_norm", kv, config.n_kv_heads)):
            attribute = f"attention.{which}.weight"
            found.append(
                Parameter(f"blocks.{index}.{attribute}", layer, attribute, (size,), Init(constant=1.0), False, 0, units, which == "key_norm")
            )
    row("attention.output", query, config.attention_output_bias, config.n_heads)
    if config.norm_placement in ("post", "sandwich"):
        norm("attention_post_norm")
    if config.norm_placement in ("pre", "sandwich") and not config.shared_norm:
        norm("mlp_norm")
    if config.gated_mlp:
        column("mlp.gate", ffn, config.mlp_bias, ffn)
    column("mlp.up", ffn, config.mlp_bias, ffn)
    row("mlp.down", ffn, config.mlp_bias, ffn)
    if config.norm_placement in ("post", "sandwich"):
        norm("mlp_post_norm")
    return found


@functools.lru_cache(maxsize=32)
def parameter_table(config: ModelConfig) -> ParameterTable:
    """The parameter table of a model.

    Query, key and value (and gate and up) are parameters of their own: every split is then a plain chunk of one
    dimension, which DeepSpeed's universal checkpoint needs, and key/value heads can be replicated by themselves.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    head, normal = head_layer(config), Init(std=config.init_std)
    has_norm_bias = config.norm == "layernorm" and config.norm_bias
    vocabulary = dict(split_dim=0, units=vocab, padded_rows=config.padded_vocab_size)
    found = [
        Parameter("embedding.weight", TOKEN_EMBEDDING_LAYER, "weight", (vocab, hidden), normal, True, tied_layers=(head,) if config.tied_head else (), **vocabulary)  # type: ignore[arg-type]
    ]
    if config.position == "learned":
        shape = (config.max_positions + config.position_offset, hidden)
        found.append(Parameter("position.weight", POSITION_LAYER, "weight", shape, normal, True, partial_grad=PartialGrad.SEQUENCE_PARALLEL))
    if config.embedding_norm:
        found.extend(_norm(config, "embedding_norm", POSITION_LAYER, "norm", hidden, has_norm_bias))
    for index in range(config.n_layers):
        found.extend(_block(config, index))
    found.extend(_norm(config, "final_norm", final_norm_layer(config), "norm", hidden, has_norm_bias))
    if not config.tied_head:
        found.append(Parameter("head.weight", head, "weight", (vocab, hidden), normal, True, **vocabulary))  # type: ignore[arg-type]
    if config.head_bias:
        found.append(Parameter("head.bias", head, "bias", (vocab,), Init(), False, **vocabulary))  # type: ignore[arg-type]
    return ParameterTable(config, tuple(found))
