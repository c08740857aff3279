"""The FLOPs formula against operations counted by torch in transformers models, and against printed examples."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mdsp.errors import ConfigError
from mdsp.metrics.flops import (
    ForwardFlops,
    attention_pairs,
    forward_flops,
    hardware_flops,
    layer_forward_flops,
    model_flops,
    model_flops_per_token,
    recompute_flops,
    stage_forward_flops,
    tflops_per_device,
    utilization,
)
from mdsp.model.config import ModelConfig
from mdsp.model.table import pipeline_layer_count

SEQ, VOCAB = 48, 211

GPT2 = ModelConfig(n_layers=3, hidden_size=64, n_heads=4, vocab_size=VOCAB, max_positions=64)
LLAMA = ModelConfig(
    family="llama",
    n_layers=3,
    hidden_size=64,
    n_heads=8,
    n_kv_heads=2,
    head_dim=16,
    ffn_size=176,
    vocab_size=VOCAB,
    norm="rmsnorm",
    position="rotary",
    activation="silu",
    gated_mlp=True,
    qkv_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    tied_head=False,
)


def gpt2() -> PreTrainedModel:
    shape = GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel._from_config(shape, attn_implementation="eager")


def llama() -> PreTrainedModel:
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM._from_config(shape, attn_implementation="eager")


def counted(model: PreTrainedModel, tokens: int, backward: bool) -> int:
    batch = torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        loss = model(batch, labels=batch, use_cache=False).loss
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("make", "config"), [(gpt2, GPT2), (llama, LLAMA)])
def test_forward_and_backward_equal_the_operations_that_torch_counts(
    make: Callable[[], PreTrainedModel], config: ModelConfig
) -> None:
    model = make()
    assert forward_flops(config, SEQ, "full").total == counted(model, SEQ, backward=False)
    assert model_flops(config, SEQ, "full") == counted(model, SEQ, backward=True)


@pytest.mark.parametrize(("make", "config"), [(gpt2, GPT2), (llama, LLAMA)])
def test_full_recompute_equals_the_operations_that_torch_counts(
    make: Callable[[], PreTrainedModel], config: ModelConfig
) -> None:
    model = make().train()
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    for block in model.transformer.h if isinstance(model, GPT2LMHeadModel) else model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward)
    # Early stop skips the last matrix of each recomputed block, whose output nothing needs; the convention counts it.
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert hardware_flops(config, SEQ, "full", "full") == counted(model, SEQ, backward=True)


@pytest.mark.parametrize(("make", "config"), [(gpt2, GPT2), (llama, LLAMA)])
def test_packed_documents_cost_what_they_cost_one_by_one(
    make: Callable[[], PreTrainedModel], config: ModelConfig
) -> None:
    model, documents = make(), (5, 30, 13)
    alone = sum(counted(model, length, backward=True) for length in documents)
    assert model_flops(config, SEQ, "full", documents) == alone
    halved = model_flops(config, SEQ, "half", documents)
    core = 3 * forward_flops(config, SEQ, "full", documents).attention_core
    assert halved == alone - core / 2


def test_half_is_the_causal_triangle_and_the_window_cuts_it() -> None:
    # Pairs of the triangle s^2/2 lie within half a diagonal of the exact count s (s + 1) / 2.
    exact = sum(q + 1 for q in range(4096))
    assert attention_pairs(4096, "half") == pytest.approx(exact, rel=3e-4)
    exact = sum(min(q + 1, 512) for q in range(4096))
    assert attention_pairs(4096, "half", window=512) == pytest.approx(exact, rel=2e-3)
    assert attention_pairs(4096, "full", window=8192) == 4096**2
    packed = sum(min(q + 1, 512) for length in (100, 3000, 996) for q in range(length))
    assert attention_pairs(4096, "half", (100, 3000, 996), 512) == pytest.approx(packed, rel=2e-3)


def test_alternating_windows_apply_to_even_blocks_only() -> None:
    windowed = GPT2.model_copy(update={"sliding_window": 8, "sliding_window_layers": "even"})
    plain = forward_flops(GPT2, SEQ).attention_core / 3
    blocks = [layer_forward_flops(windowed, 2 + index, SEQ).attention_core for index in range(3)]
    assert blocks[1] == plain
    assert blocks[0] == blocks[2] < plain
    assert forward_flops(windowed, SEQ).attention_core == sum(blocks)


def test_wrong_document_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="add up to 40, not to the sequence length 48"):
        attention_pairs(48, "half", (30, 10))


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_stages_add_up_to_the_model(config: ModelConfig) -> None:
    layers = list(range(pipeline_layer_count(config)))
    parts = [stage_forward_flops(config, chosen, SEQ) for chosen in (layers[:2], layers[2:4], layers[4:])]
    assert sum(parts, ForwardFlops()) == forward_flops(config, SEQ)
    assert parts[0].total == 0  # embeddings are lookups
    with pytest.raises(ConfigError, match="does not exist"):
        stage_forward_flops(config, [99], SEQ)


def gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(n_layers=layers, hidden_size=hidden, n_heads=heads, vocab_size=51200, max_positions=2048)


# Narayanan et al. 2021, table 1: layers, hidden, heads
NARAYANAN = [
    (24, 2304, 24),
    (40, 6144, 48),
    (80, 12288, 96),
    (128, 25600, 160),
]


@pytest.mark.parametrize(("layers", "hidden", "heads"), NARAYANAN)
def test_narayanan_2021_equation_3(layers: int, hidden: int, heads: int) -> None:
    """F = 96 B s l h^2 (1 + s / 6h + V / 16 l h): full attention, all blocks recomputed, the head not."""
    s, v = 2048, 51200
    printed = 96 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    assert hardware_flops(gpt(layers, hidden, heads), s, "full", "full") == pytest.approx(printed, rel=1e-12)


def test_narayanan_2021_gpt3_takes_34_days() -> None:
    """Section 5.1: 300 B tokens, 1024 GPUs, 140 TFLOP/s each: 34 days, from the approximation 8 T P / (n X)."""
    per_token = hardware_flops(gpt(96, 12288, 96), 2048, "full", "full") / 2048
    days = 300e9 * per_token / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1.0)


# Korthikanti et al. 2022, tables 3 and 5: layers, hidden, heads, batch, GPUs, seconds per iteration, MFU, HFU in %
KORTHIKANTI = [
    (48, 6144, 64, 4, 8, 1.10, 41.5, 43.7),
    (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
    (105, 20480, 128, 280, 280, 37.83, 56.0, 57.0),
    (128, 25600, 160, 512, 512, 71.49, 56.3, 57.0),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "batch", "gpus", "seconds", "mfu", "hfu"), KORTHIKANTI)
def test_korthikanti_2022_table_5(
    layers: int, hidden: int, heads: int, batch: int, gpus: int, seconds: float, mfu: float, hfu: float
) -> None:
    """Appendix A: model 72 B s l h^2 (1 + s/6h + V/12lh), selective recompute adds the attention core; peak 312.

    Their HFU of selective recomputation has s/3h in place of s/6h, which is three forward cores more; what is repeated
    is one, and one is what the convention here adds. Seconds are printed to 0.01, which bounds the agreement.
    """
    config, s, v = gpt(layers, hidden, heads), 2048, 51200
    model = model_flops(config, s, "full")
    printed = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (12 * layers * hidden))
    assert model == pytest.approx(printed, rel=1e-12)
    utilized = utilization(batch * model, seconds, gpus, 312e12)
    rounding = 0.05 + mfu * 0.005 / seconds
    assert utilized is not None
    assert 100 * utilized == pytest.approx(mfu, abs=rounding)

    core = forward_flops(config, s, "full").attention_core
    assert hardware_flops(config, s, "selective", "full") == model + core
    theirs = utilization(batch * (model + 3 * core), seconds, gpus, 312e12)
    assert theirs is not None
    assert 100 * theirs == pytest.approx(hfu, abs=0.05 + hfu * 0.005 / seconds)


def test_palm_540b_appendix_b() -> None:
    """238.3 K tokens/s on 6144 TPU v4 (275 TFLOP/s): 46.2 % MFU, 45.7 % without attention; 6 N + 12 L H Q T."""
    palm = ModelConfig(
        n_layers=118,
        hidden_size=18432,
        n_heads=48,
        n_kv_heads=1,
        head_dim=256,
        ffn_size=4 * 18432,
        gated_mlp=True,
        vocab_size=256000,
        position="rotary",
        residual="parallel",
        qkv_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
    )
    tokens_per_s, chips, peak = 238.3e3, 6144, 275e12
    per_token = model_flops_per_token(palm, 2048, "full")
    # Their N = 540.35e9 is the tied embedding once, which is our head, and norms, which are no matrices.
    assert per_token == pytest.approx(6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048, rel=1e-4)
    with_attention = utilization(per_token * tokens_per_s, 1.0, chips, peak)
    core = 3 * forward_flops(palm, 2048, "full").attention_core / 2048
    without = utilization((per_token - core) * tokens_per_s, 1.0, chips, peak)
    assert with_attention is not None
    assert 100 * with_attention == pytest.approx(46.2, abs=0.05)
    assert without is not None
    assert 100 * without == pytest.approx(45.7, abs=0.05)


def test_rates() -> None:
    assert tflops_per_device(6e15, 2.0, 10) == 300.0
    assert utilization(6e15, 2.0, 10, 600e12) == 0.5
    assert utilization(6e15, 2.0, 10, None) is None
    forward = ForwardFlops(1.0, 2.0, 4.0, 8.0)
    assert [recompute_flops(forward, mode) for mode in ("none", "selective", "full")] == [0.0, 2.0, 7.0]
