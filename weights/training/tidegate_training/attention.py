"""The parts that all mixers share: projections, convolutions, rotary angles and the output norm.

A mixer is a subclass of `Attention` with a `State` (a dataclass of tensors, batch first) and three methods: `add_tensors`
creates its own parameters, `empty` returns the state of an empty text, and `mix` maps each head's q, k and v to outputs. If
the given state is None, the past is empty and no state is returned; blocks of text that are read on their own use this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import CausalConv1d, RMSNorm, rotary, rotary_angles


@dataclasses.dataclass
class MixerState:
    """The constant-size state of one layer; each mixer has its own subclass."""

    def detach(self):
        """A copy without the autograd graph."""
        return type(self)(*(None if x is None else x.detach() for x in self.tuple()))

    def tuple(self) -> tuple:
        """The tensors in field order, as stored in a run's `state.pt`."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))


class Attention(nn.Module):
    """A causal attention layer: q, k, v with optional convolutions and rotary angles, a mixer, an optional norm, and
    o_proj."""

    State: type[MixerState]

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        h, d = cfg.num_attention_heads, cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.o_proj = nn.Linear(h * d, cfg.hidden_size, bias=False)
        self.gate = nn.Linear(cfg.hidden_size, h, bias=True) if cfg.gate else None
        # For a given seed, random numbers are drawn in the order in which tensors are created; the mixer's own come here.
        self.register_parameter("sigma", None)
        self.register_buffer("random_matrices", None)
        self.draw: Tensor | None = None  # random matrices of this step, if drawn from a pool
        self.products: torch.dtype | None = None  # dtype of RFA's matrix products, if not f32
        self.add_tensors(cfg)
        self.o_norm = RMSNorm(d, cfg.rms_norm_eps) if cfg.output_norm else None
        if cfg.conv_kernel:
            self.q_conv1d = CausalConv1d(h * d, cfg.conv_kernel)
            self.k_conv1d = CausalConv1d(h * d, cfg.conv_kernel)
            self.v_conv1d = CausalConv1d(h * d, cfg.conv_kernel)

    def add_tensors(self, cfg: ModelConfig) -> None:
        """Creates the tensors that only this mixer has."""

    def empty(self, batch: int, device) -> MixerState:
        """Returns the state of `batch` empty texts."""
        raise NotImplementedError

    def mix(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, state: Any, starts: Tensor | None,
            doc: Tensor | None, chunk: int) -> tuple[Tensor, Any]:
        """Mixes the tokens of one segment, and of the past if a state is given.

        q, k, v: (batch, heads, time, head_dim), f32
        a: (batch, heads, time), the gate logits; None without a gate
        state: the state before the segment, or None; `forward` handles its `conv`
        starts, doc: as in `forward`
        -> out (batch, heads, time, head_dim), and the state after the last token, or None if `state` is None
        """
        raise NotImplementedError

    def empty_conv(self, batch: int, device) -> Tensor | None:
        """Returns the convolutions' inputs before a text, all zeros: (batch, 3, conv_kernel - 1, heads * head_dim); None
        without a convolution."""
        cfg = self.cfg
        if not cfg.conv_kernel:
            return None
        return torch.zeros(batch, 3, cfg.conv_kernel - 1, cfg.num_attention_heads * cfg.head_dim, device=device)

    def matrices(self) -> Tensor:
        """Returns the current random matrices, (heads, proj_dim, head_dim), multiplied by sigma if there is one."""
        w = self.random_matrices if self.draw is None else self.draw
        return w if self.sigma is None else w * self.sigma[:, None, :]

    def forward(self, x: Tensor, state: MixerState | None, doc: Tensor | None, starts: Tensor | None, positions: Tensor,
                chunk: int) -> tuple[Tensor, MixerState | None]:
        """Reads one segment; returns the outputs and the state after it.

        x: (batch, time, hidden)
        starts: (batch, time), true where the state is zeroed before the token
        doc: (batch, time), the number of starts up to each token
        positions: (batch, time)
        """
        cfg = self.cfg
        b, t, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = None
        if cfg.conv_kernel:
            conv = self.empty_conv(b, x.device) if state is None else state.conv
            q, tail_q = self.q_conv1d(q.float(), conv[:, 0], doc)
            k, tail_k = self.k_conv1d(k.float(), conv[:, 1], doc)
            v, tail_v = self.v_conv1d(v.float(), conv[:, 2], doc)
            conv = torch.stack([tail_q, tail_k, tail_v], dim=1)
        heads = lambda y: y.float().view(b, t, cfg.num_attention_heads, cfg.head_dim).transpose(1, 2)
        q, k, v = heads(q), heads(k), heads(v)
        if cfg.position_embedding == "rope":
            angles = rotary_angles(positions, cfg.head_dim, cfg.rope_theta)
            q, k = rotary(q, angles), rotary(k, angles)
        a = self.gate(x).float().transpose(1, 2) if self.gate is not None else None
        with torch.autocast(device_type=x.device.type, enabled=False):
            out, after = self.mix(q, k, v, a, state, starts, doc, chunk)
            if self.o_norm is not None:
                out = self.o_norm(out)
        if after is not None:
            after.conv = conv
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1)), after
