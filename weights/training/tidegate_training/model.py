"""The decoder in PyTorch: pre-norm blocks of RFA-Gate attention and SwiGLU; parameter names as in Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import rfa
from .config import ModelConfig


@dataclass
class LayerState:
    """What one layer remembers of the past, of constant size.

    s: (batch, heads, 2 * proj_dim, head_dim + 1), its last column is z; c: (batch, heads)
    conv: (batch, 3, conv_kernel - 1, heads * head_dim), the last inputs of the convolutions of q, k, v
    """

    s: Tensor
    c: Tensor
    conv: Tensor | None

    def detach(self) -> "LayerState":
        return LayerState(self.s.detach(), self.c.detach(), None if self.conv is None else self.conv.detach())


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
    """Depthwise causal convolution and SiLU; a tap that would reach over a document's start reads zero."""

    def __init__(self, dim: int, kernel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, 1, kernel))
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[:, 0, -1] += 1.0
        self.kernel = kernel

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


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates halves as Llama does. x: (batch, heads, time, head_dim), positions: (batch, time), angles in f64."""
    half = x.shape[-1] // 2
    inv = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[:, None, :, None] * inv
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RfaGateAttention(nn.Module):
    """Random feature attention with a learned scalar gate per head (Peng et al. 2021, equation 7)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        h, d = cfg.num_attention_heads, cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.o_proj = nn.Linear(h * d, cfg.hidden_size, bias=False)
        self.gate = nn.Linear(cfg.hidden_size, h, bias=True) if cfg.gate else None
        self.sigma = nn.Parameter(torch.ones(h, d))
        self.register_buffer("random_matrices", torch.randn(h, cfg.proj_dim, d))
        self.o_norm = RMSNorm(d, cfg.rms_norm_eps) if cfg.output_norm else None
        if cfg.conv_kernel:
            self.q_conv1d = CausalConv1d(h * d, cfg.conv_kernel)
            self.k_conv1d = CausalConv1d(h * d, cfg.conv_kernel)
            self.v_conv1d = CausalConv1d(h * d, cfg.conv_kernel)
        self.draw: Tensor | None = None  # random matrices of this forward pass, when drawn from a pool

    def forward(self, x: Tensor, state: LayerState, doc: Tensor | None, starts: Tensor | None, positions: Tensor, chunk: int):
        cfg = self.cfg
        b, t, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = state.conv
        if cfg.conv_kernel:
            q, tail_q = self.q_conv1d(q.float(), conv[:, 0], doc)
            k, tail_k = self.k_conv1d(k.float(), conv[:, 1], doc)
            v, tail_v = self.v_conv1d(v.float(), conv[:, 2], doc)
            conv = torch.stack([tail_q, tail_k, tail_v], dim=1)
        heads = lambda y: y.float().view(b, t, cfg.num_attention_heads, cfg.head_dim).transpose(1, 2)
        q, k, v = heads(q), heads(k), heads(v)
        if cfg.position_embedding == "rope":
            q, k = rotary(q, positions, cfg.rope_theta), rotary(k, positions, cfg.rope_theta)
        a = self.gate(x).float().transpose(1, 2) if self.gate is not None else None
        with torch.autocast(device_type=x.device.type, enabled=False):
            random = self.random_matrices if self.draw is None else self.draw
            w = random * self.sigma[:, None, :]
            phi_q = rfa.gaussian_features(rfa.unit(q), w)
            phi_k = rfa.gaussian_features(rfa.unit(k), w)
            out, (s, c) = rfa.chunked(phi_q, phi_k, v, a, (state.s, state.c), cfg.denominator_eps, chunk, starts)
            if self.o_norm is not None:
                out = self.o_norm(out)
        out = self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
        return out, LayerState(s, c, conv)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = RfaGateAttention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = Mlp(cfg)

    def forward(self, x: Tensor, state: LayerState, doc, starts, positions, chunk: int):
        attn, state = self.self_attn(self.input_layernorm(x), state, doc, starts, positions, chunk)
        x = x + attn.float()
        return x + self.mlp(self.post_attention_layernorm(x)).float(), state


class Decoder(nn.Module):
    """Token ids (batch, time) to logits (batch, time, vocab), with one `LayerState` a layer in and out."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.num_hidden_layers))
        self.model.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def init_weights(self, half_life_min: float, half_life_max: float) -> None:
        """Normal weights, residual outputs scaled by depth; gate half-lives log-spaced over the heads of a layer."""
        cfg, std = self.cfg, self.cfg.initializer_range
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(p, std=std / math.sqrt(2 * cfg.num_hidden_layers))
            elif p.ndim == 2 and name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
                nn.init.normal_(p, std=std)
        for layer in self.model.layers:
            gate = layer.self_attn.gate
            if gate is None:
                continue
            h = cfg.num_attention_heads
            life = torch.logspace(math.log10(half_life_min), math.log10(half_life_max), h)
            g = 0.5 ** (1.0 / life)
            with torch.no_grad():
                gate.weight.zero_().normal_(std=1e-3)
                gate.bias.copy_(torch.log(g / (1 - g)))

    def new_state(self, batch: int, device=None) -> list[LayerState]:
        """The state of an empty text."""
        cfg = self.cfg
        h, d = cfg.num_attention_heads, cfg.head_dim
        device = device or self.model.norm.weight.device
        zeros = lambda *shape: torch.zeros(*shape, device=device)
        return [
            LayerState(
                zeros(batch, h, 2 * cfg.proj_dim, d + 1),
                zeros(batch, h),
                zeros(batch, 3, cfg.conv_kernel - 1, h * d) if cfg.conv_kernel else None,
            )
            for _ in range(cfg.num_hidden_layers)
        ]

    def forward(
        self,
        ids: Tensor,
        state: list[LayerState],
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        chunk: int = 64,
        targets: Tensor | None = None,
    ):
        """Logits, or with `targets` (batch, time) the summed loss in nats; and the new states."""
        doc = starts.long().cumsum(1) if starts is not None else None
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.model.embed_tokens(ids)
        new = []
        for layer, s in zip(self.model.layers, state):
            x, s = layer(x, s, doc, starts, positions, chunk)
            new.append(s)
        x = self.model.norm(x)
        head = self.model.embed_tokens.weight if self.cfg.tie_word_embeddings else self.lm_head.weight
        logits = F.linear(x, head)
        if targets is None:
            return logits.float(), new
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"), new
