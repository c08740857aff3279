"""Fields of a Hugging Face `config.json`: each is used, known to be harmless, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mdsp.errors import ConfigError

REQUIRED = object()
"""Marks a field without which the model is not known."""

_HARMLESS_NAMES = """
    model_type transformers_version _name_or_path name_or_path _commit_hash architectures auto_map use_cache dtype
    torch_dtype use_bfloat16 torchscript return_dict output_hidden_states output_attentions output_scores
    return_dict_in_generate output_router_logits tie_last_hidden_states attn_implementation _attn_implementation
    _attn_implementation_autoset _attn_implementation_internal gradient_checkpointing pretraining_tp use_flash_attn
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    id2label label2id num_labels problem_type finetuning_task classifier_dropout task_specific_params tokenizer_class
    prefix do_sample temperature top_k top_p typical_p min_length max_length max_new_tokens num_beams num_beam_groups
    diversity_penalty num_return_sequences repetition_penalty length_penalty no_repeat_ngram_size early_stopping
    encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty is_decoder tie_encoder_decoder
    cross_attention_hidden_size tf_legacy_loss unsloth_version unsloth_fixed
    is_llama_config transformers.js_config
"""

HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Fields that do not change what a causal language model computes: names, token ids, generation, bookkeeping."""

REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
}
"""Fields that every configuration may have and that would change the mathematics unless they hold one of these."""

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face activation names and the function they mean (gelu_new, gelu_fast: the tanh approximation)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One Hugging Face field that holds a ModelConfig option.

    `default` is what the Hugging Face class assumes when `config.json` lacks the field (None: derived, as ModelConfig
    does); `REQUIRED` when there is no such thing. `model` names several options when one field sets them all.
    """

    hf: str
    model: str | tuple[str, ...]
    default: Any = REQUIRED
    aliases: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        return (self.model,) if isinstance(self.model, str) else self.model


class HfConfig:
    """A `config.json` being read: remembers which fields were used, and refuses the rest."""

    def __init__(self, family: str, values: Mapping[str, Any]) -> None:
        self.family = family
        self.values = values
        self._used: set[str] = set()
        self._newest = ""

    def refuse(self, key: str, rule: str) -> ConfigError:
        """The error for a field that is not understood."""
        return ConfigError(f"{self.family} config.json: {key} = {self.values.get(key)!r}: {rule}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null; marks it as used."""
        self._used.add(key)
        if self.values.get(key) is None:
            return False
        self._newest = key
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, or `default` where it is absent or null; marks it as used."""
        return self.values[key] if self.has(key) else default

    def read(self, field: Field) -> Any:
        """The value of a declared field under its name or an alias of it.

        Raises:
            ConfigError: absent though required, or present under two names with two values.
        """
        found = {name: self.values[name] for name in (field.hf, *field.aliases) if self.has(name)}
        if not found:
            if field.default is REQUIRED:
                raise ConfigError(
                    f"{self.family} config.json lacks {field.hf}; it is needed to know the model, add the true value"
                )
            value = field.default
        else:
            value = next(iter(found.values()))
            if any(other != value for other in found.values()):
                raise ConfigError(f"{self.family} config.json contradicts itself: {found}; keep the right one")
        if isinstance(value, str) and "activation" not in field.options:
            raise self.refuse(field.hf, "must be a number, true or false, without quotation marks")
        if "activation" in field.options:
            if not isinstance(value, str) or value not in ACTIVATIONS:
                raise self.refuse(field.hf, f"unknown activation; known are {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        return value

    def expect(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Refuse a field that changes the mathematics, unless it holds one of the values that mdsp computes."""
        value = self.get(key, default)
        if value not in allowed and not (value is None and default is None):
            options = " or ".join(repr(one) for one in allowed)
            raise self.refuse(key, f"not supported for this family; mdsp computes {options}")

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Around computing with values as they are: one of a wrong kind becomes a ConfigError that names its field."""
        try:
            yield
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            raise self.refuse(self._newest, "not a value that this field can have; write the true one") from None

    def ignore(self, *keys: str) -> None:
        """Mark fields of this family as harmless."""
        self._used.update(keys)

    def finish(self) -> None:
        """Refuse whatever was neither used nor is known to be harmless.

        Raises:
            ConfigError: naming the field.
        """
        for key, allowed in REFUSED_UNLESS.items():
            if key in self.values and key not in self._used and self.values[key] not in allowed:
                raise self.refuse(key, f"not supported; mdsp computes {allowed[0]!r} only")
        known = self._used | HARMLESS | set(REFUSED_UNLESS)
        unknown = sorted(key for key in self.values if key not in known)
        if unknown:
            names = ", ".join(f"{key} = {self.values[key]!r}" for key in unknown)
            raise ConfigError(
                f"{self.family} config.json has fields that mdsp does not know: {names}. They might change what the "
                f"model computes, so the model is refused; remove them if they do not"
            )
