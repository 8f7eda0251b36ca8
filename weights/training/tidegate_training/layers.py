"""The parts of a block other than its mixer: RMSNorm, the causal convolution, rotary angles, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in f32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class CausalConv1d(nn.Module):
    """A depthwise causal convolution followed by SiLU; taps before the document's start read zero."""

    def __init__(self, dim: int, kernel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, 1, kernel))
        self.kernel = kernel
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initializes the convolution to nearly the identity: the current token's tap is about 1, the others about 0."""
        self.weight.normal_(std=0.1, generator=generator)
        self.weight[:, 0, -1] += 1.0

    def forward(self, x: Tensor, tail: Tensor, doc: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: (batch, time, dim), tail: (batch, kernel - 1, dim), doc: (batch, time) -> y and the new tail"""
        k, t = self.kernel, x.shape[1]
        full = torch.cat([tail, x], dim=1)
        if doc is None:
            y = F.conv1d(full.transpose(1, 2), self.weight, groups=full.shape[-1]).transpose(1, 2)
            return F.silu(y), full[:, -(k - 1) :]
        doc_full = F.pad(doc, (k - 1, 0))
        y = 0.0
        for j in range(k):
            same = (doc_full[:, j : j + t] == doc).unsqueeze(-1)
            y = y + torch.where(same, full[:, j : j + t], 0.0) * self.weight[:, 0, j]
        same = (doc_full[:, -(k - 1) :] == doc[:, -1:]).unsqueeze(-1)
        return F.silu(y), torch.where(same, full[:, -(k - 1) :], 0.0)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine of each position's angles, computed in f64: (batch, 1, time, head_dim / 2) each, f32.
    positions: (batch, time)"""
    half = head_dim // 2
    inv = theta ** (-torch.arange(half, dtype=torch.float64, device=positions.device) / half)
    angle = positions.double()[:, None, :, None] * inv
    return angle.cos().float(), angle.sin().float()


def rotary(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the two halves of each head against each other, as Llama does. x: (batch, heads, time, head_dim); angles:
    from `rotary_angles`"""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
