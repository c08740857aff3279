"""How attention learns about positions: rotary angles, ALiBi slopes, causal and windowed masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mdsp.model.config import ModelConfig, RopeScaling


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position of each rotated pair, [rotary_dim / 2] fp32, and the factor on cos and sin.

    theta_i = base^(-2i / rotary_dim) (Su et al. 2021), stretched as `rope_scaling` says.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    frequencies = 1.0 / config.rotary_base**exponents
    if config.rope_scaling is None:
        return frequencies, 1.0
    return _stretch(frequencies, config.rope_scaling, config)


def _stretch(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[Tensor, float]:
    original = scaling.original_max_positions or config.max_positions
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        # Short wavelengths stay, long ones are stretched, those between are blended (Llama 3.1 reference code).
        wavelengths = 2 * math.pi / frequencies
        blend = (original / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        stretched = frequencies / scaling.factor
        blended = (1 - blend) * stretched + blend * frequencies
        out = torch.where(wavelengths > original / scaling.low_freq_factor, stretched, blended)
        return torch.where(wavelengths < original / scaling.high_freq_factor, frequencies, out), 1.0

    # YaRN (Peng et al. 2023): by how many turns a dimension makes over the original context.
    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.rotary_base))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.rotary_dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp), factor


def rotary_tables(config: ModelConfig, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each [seq, 1, 1, rotary_dim], laid out as `apply_rotary` wants them."""
    frequencies, factor = rotary_frequencies(config)
    angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies)
    angles = angles.repeat_interleave(2, -1) if config.rotary_interleaved else torch.cat((angles, angles), -1)
    angles = angles[:, None, None, :].to(device)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of every head. x: [seq, batch, heads, head_dim]."""
    size = cos.shape[-1]
    rotated, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    if interleaved:
        pairs = rotated.unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    else:
        half = size // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
    out = rotated * cos + turned * sin
    return out if rest is None else torch.cat((out, rest), -1)


def alibi_slopes(heads: int) -> list[float]:
    """Slope of each head (Press et al. 2022): 2^(-8i/n) for a power of two, interleaved with the next one otherwise."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


def attention_bias(
    seq: int, window: int | None, slopes: Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the scores, [heads or 1, seq, seq], or None where a plain causal mask is all there is."""
    if window is not None and window >= seq:
        window = None
    if window is None and slopes is None:
        return None
    position = torch.arange(seq, device=device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    bias = torch.zeros(1, seq, seq, device=device, dtype=torch.float32)
    if slopes is not None:
        bias = slopes.to(device).view(-1, 1, 1) * -distance.float()
    return bias.masked_fill(hidden, -torch.inf).to(dtype)
