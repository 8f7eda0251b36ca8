"""A bidirectional block: the decoder's norms and SwiGLU, with attention over the whole sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Mlp, RMSNorm, rotary


class Softmax(nn.Module):
    """Softmax attention from every query to every key that is not masked."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
        """q, k, v: (batch, heads, time, head_dim); masks: bool (batch, time), false for padding -> same shape as q"""
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class BidirectionalAttention(nn.Module):
    """Attention over the whole sequence: q, k and v with rotary positions, a mixer, and the output projection."""

    def __init__(self, cfg, mixer: nn.Module):
        super().__init__()
        self.cfg = cfg
        h, d = cfg.num_attention_heads, cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.o_proj = nn.Linear(h * d, cfg.hidden_size, bias=False)
        self.mixer = mixer

    def forward(self, x: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x: (batch, time, hidden_size); mask: bool (batch, time); angles: of all positions, from `rotary_angles` -> same
        shape as x"""
        b, t, _ = x.shape
        heads = lambda y: y.float().view(b, t, self.cfg.num_attention_heads, self.cfg.head_dim).transpose(1, 2)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotary(q, angles), rotary(k, angles)
        with torch.autocast(device_type=x.device.type, enabled=False):
            out = self.mixer(q, k, v, mask, mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    cfg: has hidden_size, intermediate_size, num_attention_heads, head_dim and rms_norm_eps
    mixer: a module that is called like `Softmax`, which is the default
    """

    def __init__(self, cfg, mixer: nn.Module | None = None):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = BidirectionalAttention(cfg, mixer or Softmax())
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = Mlp(cfg)

    def forward(self, x: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, angles).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()
