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
        """Elements that one tensor rank really holds for a pipeline layer, padding and tied copies included."""
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


class _Collector:
    """Collects the parameters of one pipeline layer; `prefix` begins their names in the table."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str) -> None:
        self.config, self.layer, self.prefix = config, layer, prefix
        self.found: list[Parameter] = []
        self.normal = Init(std=config.init_std)
        self.into_residual = Init(std=config.init_std / (2 * config.n_layers) ** 0.5)

    def add(
        self,
        attribute: str,
        shape: tuple[int, ...],
        init: Init,
        *,
        decay: bool = False,
        split_dim: int | None = None,
        units: int = 1,
        optional_split: bool = False,
        padded_rows: int = 0,
        partial_grad: PartialGrad = PartialGrad.NEVER,
        tied_layers: tuple[int, ...] = (),
        name: str | None = None,
    ) -> None:
        # Positional, in the order of the fields.
        split = (split_dim, units, optional_split, padded_rows)
        full_name = self.prefix + (name or attribute)
        self.found.append(
            Parameter(full_name, self.layer, attribute, shape, init, decay, *split, partial_grad, tied_layers)
        )

    def norm(self, attribute: str, name: str | None = None) -> None:
        """Weight and, for LayerNorm with one, bias; under sequence parallelism each rank sees a slice of the tokens."""
        config = self.config
        name = name or attribute
        shape, partial = (config.hidden_size,), PartialGrad.SEQUENCE_PARALLEL
        one = Init(constant=0.0 if config.norm_unit_offset else 1.0)
        self.add(f"{attribute}.weight", shape, one, partial_grad=partial, name=f"{name}.weight")
        if config.norm == "layernorm" and config.norm_bias:
            self.add(f"{attribute}.bias", shape, Init(), partial_grad=partial, name=f"{name}.bias")

    def head_norm(self, attribute: str, heads: int, optional_split: bool) -> None:
        """Norm on queries or keys: one weight for every head, or one over all heads, split like them."""
        one, size = Init(constant=1.0), self.config.head_dim
        if self.config.qk_norm == "head":
            self.add(f"{attribute}.weight", (size,), one, partial_grad=PartialGrad.ALWAYS)
        else:
            shape = (heads * size,)
            self.add(f"{attribute}.weight", shape, one, split_dim=0, units=heads, optional_split=optional_split)

    def column(self, attribute: str, rows: int, bias: bool, units: int, optional_split: bool = False) -> None:
        """A matrix split along its outputs: [out / tp, in], bias [out / tp]."""
        shape = (rows, self.config.hidden_size)
        self.add(
            f"{attribute}.weight",
            shape,
            self.normal,
            decay=True,
            split_dim=0,
            units=units,
            optional_split=optional_split,
        )
        if bias:
            self.add(f"{attribute}.bias", (rows,), Init(), split_dim=0, units=units, optional_split=optional_split)

    def row(self, attribute: str, columns: int, bias: bool, units: int) -> None:
        """A matrix split along its inputs: [out, in / tp]; the bias is whole on every rank and added once."""
        hidden = self.config.hidden_size
        self.add(f"{attribute}.weight", (hidden, columns), self.into_residual, decay=True, split_dim=1, units=units)
        if bias:
            self.add(f"{attribute}.bias", (hidden,), Init(), partial_grad=PartialGrad.SEQUENCE_PARALLEL)

    def vocabulary(self, attribute: str, name: str, shape: tuple[int, ...], init: Init, tied: tuple[int, ...]) -> None:
        """Rows are tokens, split over the group after padding."""
        self.add(
            attribute,
            shape,
            init,
            decay=len(shape) > 1,
            split_dim=0,
            units=self.config.vocab_size,
            padded_rows=self.config.padded_vocab_size,
            tied_layers=tied,
            name=name,
        )


def _block(config: ModelConfig, index: int) -> list[Parameter]:
    block = _Collector(config, FIRST_BLOCK_LAYER + index, f"blocks.{index}.")
    query, kv, ffn = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.ffn_size
    before, after = config.norm_placement != "post", config.norm_placement != "pre"
    if before:
        block.norm("attention_norm")
    block.column("attention.query", query, config.qkv_bias, config.n_heads)
    block.column("attention.key", kv, config.qkv_bias, config.n_kv_heads, optional_split=True)
    block.column("attention.value", kv, config.qkv_bias, config.n_kv_heads, optional_split=True)
    if config.qk_norm != "none":
        block.head_norm("attention.query_norm", config.n_heads, optional_split=False)
        block.head_norm("attention.key_norm", config.n_kv_heads, optional_split=True)
    block.row("attention.output", query, config.attention_output_bias, config.n_heads)
    if after:
        block.norm("attention_post_norm")
    if before and not config.shared_norm:
        block.norm("mlp_norm")
    if config.gated_mlp:
        block.column("mlp.gate", ffn, config.mlp_bias, ffn)
    block.column("mlp.up", ffn, config.mlp_bias, ffn)
    block.row("mlp.down", ffn, config.mlp_bias, ffn)
    if after:
        block.norm("mlp_post_norm")
    return block.found


@functools.lru_cache(maxsize=32)
def parameter_table(config: ModelConfig) -> ParameterTable:
    """The parameter table of a model.

    Query, key and value (and gate and up) are parameters of their own: every split is then a plain chunk of one
    dimension, which DeepSpeed's universal checkpoint needs, and key/value heads can be replicated by themselves.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    head_index = head_layer(config)
    embedding = _Collector(config, TOKEN_EMBEDDING_LAYER, "")
    tied = (head_index,) if config.tied_head else ()
    embedding.vocabulary("weight", "embedding.weight", (vocab, hidden), embedding.normal, tied)
    position = _Collector(config, POSITION_LAYER, "")
    if config.position == "learned":
        rows = config.max_positions + config.position_offset
        partial = PartialGrad.SEQUENCE_PARALLEL
        position.add(
            "weight", (rows, hidden), position.normal, decay=True, partial_grad=partial, name="position.weight"
        )
    if config.embedding_norm:
        position.norm("norm", "embedding_norm")
    blocks = [parameter for index in range(config.n_layers) for parameter in _block(config, index)]
    final = _Collector(config, final_norm_layer(config), "")
    final.norm("norm", "final_norm")
    head = _Collector(config, head_index, "")
    if not config.tied_head:
        head.vocabulary("weight", "head.weight", (vocab, hidden), head.normal, ())
    if config.head_bias:
        head.vocabulary("bias", "head.bias", (vocab,), Init(), ())
    return ParameterTable(config, (*embedding.found, *position.found, *blocks, *final.found, *head.found))
