"""Rotary frequencies of every scaling Baton knows, equal to those of transformers."""

import math

import torch
from torch import Tensor

from core.model_config import RopeConfig

_ROWS = 1024  # of the table, made at once


class RotaryEmbedding:
    """cos and sin of every token's angles. They depend on the token alone, never on how a prompt is cut."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._config = config
        self._inv_freq = _inverse_frequencies(config).to(device)
        self._exponents = _exponents(config).to(device, torch.float64)
        empty = torch.empty(0, len(self._inv_freq), device=device)
        self._table = (empty, empty)  # cos and sin of the positions met so far, where only the position counts

    @property
    def is_positional(self) -> bool:
        """Whether a token's angles depend on its position alone, so that there is a `table`."""
        return self._config.kind != "dynamic"

    def table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [at least num_positions, rotary_dim / 2] float32 each, of positions from 0 on."""
        assert self.is_positional
        cos, sin = self._table
        if len(cos) < num_positions:
            starts = range(len(cos), num_positions, _ROWS)
            pieces = [self._of(torch.arange(at, at + _ROWS, device=cos.device), self._inv_freq) for at in starts]
            cos, sin = self._table = (
                torch.cat((cos, *(piece[0] for piece in pieces))),
                torch.cat((sin, *(piece[1] for piece in pieces))),
            )
        return cos, sin

    def angles(self, positions: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what `kernels.rope` takes.

        Args:
            positions: [n] int32 or int64, each token's position; at least one.
            prompt_lens: [n] of the same, the prompt length of each token's sequence; only dynamic scaling looks at it.
        Returns:
            cos and sin, [n, rotary_dim / 2] float32 each.
        """
        if not self.is_positional:
            return self._of(positions, self._dynamic(torch.maximum(prompt_lens, positions + 1)))
        cos, sin = self.table(int(positions.max()) + 1)
        return cos[positions], sin[positions]

    def _of(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * inv_freq
        return angles.cos() * self._config.attention_factor, angles.sin() * self._config.attention_factor

    def _dynamic(self, lens: Tensor) -> Tensor:
        """[n, rotary_dim / 2]: the base grows with the length a token's KV was computed at (dynamic NTK scaling)."""
        config = self._config
        # In float64, rounded once: torch takes another float32 power for one token than for many, and rounds it differently.
        ratio = lens.clamp_min(config.original_max_tokens).double() / config.original_max_tokens
        growth = (config.factor * ratio - (config.factor - 1)) ** (config.rotary_dim / (config.rotary_dim - 2))
        return (1.0 / (config.theta * growth[:, None]) ** self._exponents).float()


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim


def _inverse_frequencies(config: RopeConfig) -> Tensor:
    """[rotary_dim / 2] float32."""
    inv_freq = 1.0 / config.theta ** _exponents(config)
    match config.kind:
        case "linear":
            return inv_freq / config.factor
        case "llama3":
            return _llama3(config, inv_freq)
        case "yarn":
            return _yarn(config)
        case "default" | "dynamic":
            return inv_freq


def _llama3(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, and those between blended."""
    wavelengths = 2 * math.pi / inv_freq
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = ((config.original_max_tokens / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / config.factor + smooth * inv_freq


def _yarn(config: RopeConfig) -> Tensor:
    """Source: YaRN (Peng et al., ICLR 2024), section 3.2."""

    def correction_dim(rotations: float) -> float:
        scale = math.log(config.original_max_tokens / (rotations * 2 * math.pi))
        return config.rotary_dim * scale / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    steps = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = config.theta ** _exponents(config)
    return ramp / (config.factor * frequencies) + (1 - ramp) / frequencies
