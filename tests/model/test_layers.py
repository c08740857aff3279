"""SingleProcessGPT against `transformers`: what the model computes, for combinations of options that no family has."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mdsp.model.config import ModelConfig
from mdsp.model.layers import SingleProcessGPT
from mdsp.model.table import Parameter, parameter_table
from tests.model.hf_models import (
    GPT2_STYLE,
    LLAMA_BLOCK,
    LLAMA_OUTER,
    LLAMA_STYLE,
    QKV,
    SEQ,
    HfModel,
    Tensors,
    bloom,
    causal_lm,
    cut,
    gemma2,
    gpt2,
    gptj,
    hf_logits,
    llama,
    olmo2,
    qwen3,
    rename,
)  # fmt: skip

LLAMA_SIZES = dict(
    vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=SEQ,
)  # fmt: skip
SIZES = dict(vocab_size=131, hidden_size=32, ffn_size=48, n_layers=2, n_heads=4, max_positions=SEQ)
GQA = dict(SIZES, n_kv_heads=2)


def _cohere() -> HfModel:
    """Parallel residual, one LayerNorm without bias, interleaved rotary, scaled logits, tied, gated."""
    build = causal_lm("CohereConfig", **LLAMA_SIZES, logit_scale=0.25)
    fields = dict(
        {**LLAMA_STYLE, **GQA}, norm="layernorm", norm_bias=False, residual="parallel", shared_norm=True,
        rotary_interleaved=True, rotary_base=500000.0, logit_multiplier=0.25, tied_head=True,
    )  # fmt: skip
    return HfModel("cohere", build, fields, lambda hf: rename(hf, LLAMA_OUTER, "model.layers", LLAMA_BLOCK))


def _mpt() -> HfModel:
    """ALiBi, LayerNorm without bias, exact GELU, no bias at all, tied."""
    build = causal_lm("MptConfig", vocab_size=131, d_model=32, n_heads=4, n_layers=2, max_seq_len=SEQ)
    fields = dict(
        {**GPT2_STYLE, **SIZES}, ffn_size=128, norm_bias=False, position="alibi", activation="gelu", qkv_bias=False,
        attention_output_bias=False, mlp_bias=False, tied_head=True,
    )  # fmt: skip
    outer = {"transformer.wte": "embedding", "transformer.norm_f": "final_norm"}
    inner = {
        "norm_1": "attention_norm", "attn.Wqkv": "fused", "attn.out_proj": "attention.output", "norm_2": "mlp_norm",
        "ffn.up_proj": "mlp.up", "ffn.down_proj": "mlp.down",
    }  # fmt: skip
    return HfModel(
        "mpt",
        build,
        fields,
        lambda hf: cut(rename(hf, outer, "transformer.blocks", inner), "fused", dict.fromkeys(QKV, 32)),
    )


def _glm4() -> HfModel:
    """Sandwich RMSNorm, half of each head rotated in interleaved pairs, biases on queries, keys and values alone."""
    build = causal_lm("Glm4Config", **LLAMA_SIZES, head_dim=8, attention_bias=True, rms_norm_eps=1e-5)
    fields = dict(
        {**LLAMA_STYLE, **GQA}, norm_placement="sandwich", rotary_dim=4, rotary_interleaved=True, qkv_bias=True,
        tied_head=False,
    )  # fmt: skip
    inner = {
        **LLAMA_BLOCK, "post_self_attn_layernorm": "attention_post_norm", "post_mlp_layernorm": "mlp_post_norm",
        "mlp.gate_up_proj": "fused",
    }  # fmt: skip
    halves = {"mlp.gate": 48, "mlp.up": 48}
    return HfModel(
        "glm4", build, fields, lambda hf: cut(rename(hf, LLAMA_OUTER, "model.layers", inner), "fused", halves)
    )


def _biogpt() -> HfModel:
    """Learned positions that start at row 2 under scaled embeddings, exact GELU."""
    build = causal_lm(
        "BioGptConfig", vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=SEQ, layer_norm_eps=1e-12, layerdrop=0.0,
    )  # fmt: skip
    fields = dict(
        {**GPT2_STYLE, **SIZES}, norm_eps=1e-5, activation="gelu", position_offset=2, embedding_multiplier=32**0.5,
        tied_head=True,
    )  # fmt: skip
    outer = {
        "biogpt.embed_tokens": "embedding", "biogpt.embed_positions": "position", "biogpt.layer_norm": "final_norm",
    }  # fmt: skip
    inner = {
        "self_attn_layer_norm": "attention_norm", "final_layer_norm": "mlp_norm", "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key", "self_attn.v_proj": "attention.value",
        "self_attn.out_proj": "attention.output", "fc1": "mlp.up", "fc2": "mlp.down",
    }  # fmt: skip
    return HfModel("biogpt", build, fields, lambda hf: rename(hf, outer, "biogpt.layers", inner))


def _nope() -> HfModel:
    """No positions at all (SmolLM 3 with rotation switched off in every layer)."""
    build = causal_lm("SmolLM3Config", **LLAMA_SIZES, no_rope_layers=[0, 0], rms_norm_eps=1e-5)
    fields = dict({**LLAMA_STYLE, **GQA}, position="none", tied_head=True)
    return HfModel("no positions", build, fields, lambda hf: rename(hf, LLAMA_OUTER, "model.layers", LLAMA_BLOCK))


def _exaone4() -> HfModel:
    """Norms after attention and MLP, norms on query and key heads, a window on every layer."""
    build = causal_lm(
        "Exaone4Config", **LLAMA_SIZES, sliding_window=5, layer_types=["sliding_attention"] * 2, rms_norm_eps=1e-5,
        sliding_window_pattern=4, tie_word_embeddings=False,
    )  # fmt: skip
    fields = dict({**LLAMA_STYLE, **GQA}, norm_placement="post", qk_norm="head", sliding_window=5, tied_head=False)
    inner = {
        **LLAMA_BLOCK, "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }  # fmt: skip
    return HfModel("exaone4", build, fields, lambda hf: rename(hf, LLAMA_OUTER, "model.layers", inner))


def _falcon() -> HfModel:
    """One key/value head, parallel residual with a shared LayerNorm, rotary, exact GELU without gate."""
    build = causal_lm(
        "FalconConfig", vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True,
        parallel_attn=True, new_decoder_architecture=False, bias=False, alibi=False,
    )  # fmt: skip
    fields = dict(
        {**GPT2_STYLE, **SIZES}, n_kv_heads=1, ffn_size=128, position="rotary", residual="parallel", shared_norm=True,
        activation="gelu", qkv_bias=False, attention_output_bias=False, mlp_bias=False, tied_head=True,
    )  # fmt: skip
    outer = {"transformer.word_embeddings": "embedding", "transformer.ln_f": "final_norm"}
    inner = {
        "input_layernorm": "attention_norm", "self_attention.query_key_value": "fused",
        "self_attention.dense": "attention.output", "mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down",
    }  # fmt: skip
    rows = dict(zip(QKV, (32, 8, 8), strict=True))
    return HfModel("falcon", build, fields, lambda hf: cut(rename(hf, outer, "transformer.h", inner), "fused", rows))


MODELS = [
    _cohere(), _mpt(), _glm4(), _biogpt(), _nope(), _exaone4(), _falcon(),
    # The models of the parity tests: a difference between layouts is then one of layouts.
    gpt2("gpt2"), gpt2("gpt2 untied", tied=False), llama("llama", kv_heads=2, biases=True),
    llama("llama MQA", kv_heads=1, tied=True), qwen3("qwen3"), olmo2("olmo2"), bloom("bloom"), gptj("gptj"),
    gemma2("gemma2"),
]  # fmt: skip


class _Whole:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        return self.tensors[parameter.name]


def _gradients(model: HfModel, hf: torch.nn.Module) -> Mapping[str, Tensor]:
    return {name: parameter.grad for name, parameter in hf.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_logits_and_gradients(model: HfModel) -> None:
    """Logits, and the gradient of every parameter for a random direction of the logits, in float64."""
    hf = model.build().double()
    tensors = model.to_table({name: parameter.detach() for name, parameter in hf.named_parameters()})
    config = ModelConfig(**model.fields)
    table = parameter_table(config)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {p.name: p.shape for p in table}
    mine = SingleProcessGPT(config, _Whole(tensors), torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, SEQ), generator=generator)
    direction = torch.randn(2, SEQ, config.vocab_size, generator=generator, dtype=torch.float64)
    wanted, found = hf_logits(hf, ids), mine(ids)
    # transformers computes norms, softmax and rotary angles in fp32 whatever the model's precision.
    assert float((found - wanted).detach().norm() / wanted.detach().norm()) < 2e-6
    (wanted * direction).sum().backward()
    (found * direction).sum().backward()
    grads = model.to_table(_gradients(model, hf))
    scale = max(float(grad.norm()) for grad in grads.values())
    for name, parameter in mine.parameters_by_entry().items():
        assert parameter.grad is not None, name
        grad = parameter.grad[: len(grads[name])]
        assert float((grad - grads[name]).norm()) < 1e-5 * float(grads[name].norm()) + 1e-8 * scale, name


def test_recomputation_in_one_process() -> None:
    """Full recomputation gives the same loss and gradients as none, dropout on, to the bit."""
    fields = {**gpt2("gpt2").fields, "hidden_dropout": 0.2, "attention_dropout": 0.2, "embedding_dropout": 0.2}
    ids = torch.randint(0, 257, (2, SEQ), generator=torch.Generator().manual_seed(0))
    found = []
    for recompute, interval in (("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 9)):
        model = SingleProcessGPT(ModelConfig(**fields)).train()
        model.context.recompute, model.context.recompute_interval = recompute, interval  # type: ignore[assignment]
        model(ids).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))


def test_hidden_states_are_those_of_the_pipeline_layers() -> None:
    """One per layer but the head, of which the last leads to the logits."""
    fields = gpt2("gpt2").fields
    model = SingleProcessGPT(ModelConfig(**fields)).eval()
    ids = torch.randint(0, 257, (2, SEQ), generator=torch.Generator().manual_seed(0))
    states = model.hidden_states(ids)
    assert len(states) == 3 + 3
    logits = states[-1].transpose(0, 1) @ model.embedding.weight[:257].t()
    torch.testing.assert_close(logits, model(ids))
