"""ModelConfig: what the transformer is. Nothing here knows about parallelism, Hugging Face, torch or DeepSpeed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Frozen(BaseModel):
    """Base of all configuration sections: immutable, typed, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )


class RopeScaling(Frozen):
    """How rotary frequencies are stretched for contexts longer than the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: position / factor (Chen et al. 2023). llama3: by wavelength bands (Llama 3.1). yarn: Peng et al. 2023."""
    factor: float = Field(gt=0)
    """Stretch of the context."""
    original_max_positions: int | None = None
    """Context length before stretching (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are fully stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is fully stretched."""
    attention_factor: float | None = None
    """yarn: factor on cos and sin; None means 0.1 ln(factor) + 1."""


class ModelConfig(Frozen):
    """A decoder-only transformer.

    Defaults are GPT-2's choices; a family (`mdsp.families`) replaces them by its own. One block computes, for
    `norm_placement` "pre" and residual "sequential":

        x = x + dropout(attention(norm1(x)))
        x = x + dropout(mlp(norm2(x)))
    """

    family: str = "gpt2"
    """Hugging Face family whose tensor names and config fields this model exports to."""

    n_layers: int = Field(gt=0, le=10_000)
    """Number of transformer blocks."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    n_heads: int = Field(gt=0)
    """Number of query heads."""
    n_kv_heads: int = Field(default=0, ge=0)
    """Number of key/value heads (grouped-query attention); 0 means `n_heads`."""
    head_dim: int = Field(default=0, ge=0)
    """Width of one head; 0 means `hidden_size / n_heads`."""
    ffn_size: int = Field(default=0, ge=0)
    """Inner width of the MLP; 0 means `4 * hidden_size`."""
    vocab_size: int = Field(gt=0)
    """True number of tokens. Padding for speed and for tensor parallelism is derived and never visible."""
    max_positions: int = Field(default=1024, gt=0)
    """Longest sequence the model accepts; the size of the table for learned positions."""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation: LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance."""
    norm_bias: bool = True
    """Whether LayerNorm has a bias (RMSNorm never has one)."""
    norm_unit_offset: bool = False
    """The norm multiplies by `1 + weight` (Gemma)."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: x + f(norm(x)). post: x + norm(f(x)) (OLMo 2). sandwich: x + norm(f(norm(x))) (Gemma 2)."""
    embedding_norm: bool = False
    """A norm right after the embedding (BLOOM)."""
    residual: Literal["sequential", "parallel"] = "sequential"
    """parallel: x + attention(norm1(x)) + mlp(norm2(x)) (GPT-J, GPT-NeoX)."""
    shared_norm: bool = False
    """With parallel residual: attention and MLP read the same norm (GPT-J)."""

    position: Literal["learned", "rotary", "alibi", "none"] = "learned"
    """How positions enter: a table, RoPE (Su et al. 2021), ALiBi (Press et al. 2022), or not at all."""
    position_offset: int = Field(default=0, ge=0)
    """Unused rows before the first learned position (OPT has 2)."""
    rotary_dim: int = Field(default=0, ge=0)
    """Leading dimensions of each head that are rotated; 0 means all."""
    rotary_base: float = Field(default=10000.0, gt=0)
    """RoPE base (theta)."""
    rotary_interleaved: bool = False
    """Rotate pairs (0,1), (2,3)... (GPT-J) instead of halves (0,d/2), (1,d/2+1)... (GPT-NeoX, Llama)."""
    rope_scaling: RopeScaling | None = None
    """Context extension of RoPE."""

    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu_tanh"
    """MLP non-linearity; gelu is the exact error-function form, gelu_tanh its tanh approximation."""
    gated_mlp: bool = False
    """down(act(gate(x)) * up(x)) instead of down(act(up(x))) (Shazeer 2020)."""
    qkv_bias: bool = True
    """Bias on the query, key and value projections."""
    attention_output_bias: bool = True
    """Bias on the attention output projection."""
    mlp_bias: bool = True
    """Bias on the MLP projections."""
    head_bias: bool = False
    """Bias on the vocabulary head (GPT-J)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys before RoPE: per head (Qwen 3) or over all heads together (OLMo 2)."""
    tied_head: bool = True
    """The vocabulary head is the transposed token embedding."""

    attention_scale: float | None = None
    """Factor on query-key products; None means 1 / sqrt(head_dim)."""
    attention_softcap: float | None = Field(default=None, gt=0)
    """cap * tanh(scores / cap) before the softmax (Gemma 2)."""
    logit_softcap: float | None = Field(default=None, gt=0)
    """cap * tanh(logits / cap) before the loss (Gemma 2)."""
    sliding_window: int | None = Field(default=None, gt=0)
    """A token sees itself and the `sliding_window - 1` tokens before it."""
    sliding_window_layers: Literal["all", "even"] = "all"
    """Which blocks use the window: all (Mistral), or blocks 0, 2, 4... (Gemma 2)."""
    embedding_multiplier: float = 1.0
    """Factor on the token embeddings (Gemma, Granite)."""
    residual_multiplier: float = 1.0
    """Factor on each branch before it is added to the residual (Granite)."""
    logit_multiplier: float = 1.0
    """Factor on the logits (Granite divides by logits_scaling)."""

    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout after the embedding."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the output of attention and MLP, before the residual."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on attention probabilities."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of new weights. Projections into the residual are scaled by 1 / sqrt(2 n_layers) (GPT-2)."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        heads, hidden = values.get("n_heads"), values.get("hidden_size")
        if not isinstance(heads, int) or not isinstance(hidden, int) or heads <= 0:
            return values  # the field checks report these
        if not values.get("n_kv_heads"):
            values["n_kv_heads"] = heads
        if not values.get("head_dim"):
            if hidden % heads:
                raise ValueError(
                    f"hidden_size {hidden} is not a multiple of n_heads {heads}; choose n_heads from the divisors of "
                    f"hidden_size, or set head_dim"
                )
            values["head_dim"] = hidden // heads
        if not values.get("ffn_size"):
            values["ffn_size"] = 4 * hidden
        if not values.get("rotary_dim"):
            values["rotary_dim"] = values["head_dim"]
        return values

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}; each key/value head serves "
                f"the same number of query heads"
            )
        if self.position == "rotary" and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}")
        if self.shared_norm and self.residual != "parallel":
            raise ValueError('shared_norm needs residual "parallel"')
        if self.residual == "parallel" and self.norm_placement != "pre":
            raise ValueError(f'residual "parallel" needs norm_placement "pre", not "{self.norm_placement}"')
        if self.head_bias and self.tied_head:
            raise ValueError("head_bias needs an untied head; set tied_head to false")
        if self.norm == "layernorm" and self.norm_unit_offset:
            raise ValueError('norm_unit_offset needs norm "rmsnorm"')
        return self

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: `vocab_size` rounded up to a multiple of 128, at every layout."""
        return -(-self.vocab_size // 128) * 128
