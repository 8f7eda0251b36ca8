"""Random feature attention: the recurrence in its chunked form, and the mixer around it, with any feature map.

Peng et al., "Random Feature Attention" (ICLR 2021), equations 5 to 7. The same mathematics is in the Rust crate
`tidegate-model` (`ops/naive.rs`, `ops/chunk.rs`); golden fixtures tie the two together. The step-by-step truth is in
`naive.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import features
from .attention import Attention, MixerState
from .config import ModelConfig


def normalise(num: Tensor, den: Tensor, c: Tensor, eps: float) -> Tensor:
    """num / max(den, eps * c); no gradient through the denominator where the clamp holds. Where the gates took nothing
    in, den and c are 0 and so is the result. Positive maps (elu, favor) need no clamp: their eps is 0.

    num: (..., head_dim), den and c: (...)
    """
    held = torch.maximum(den, eps * c.detach()).clamp_min(torch.finfo(den.dtype).tiny)
    return num / held.unsqueeze(-1)


def weights(a: Tensor | None, entering: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How much of what reaches what within each chunk.

    a: (batch, heads, chunks, chunk) gate logits, or None; entering: (batch or 1, 1, chunks, chunk), false where a step
    takes nothing in and forgets nothing; starts: as `entering` -> the weight of each token's key for each token's query
    (..., chunk, chunk), of the carried sums for each query, of each key for the sums carried on (both ..., chunk), and
    of the carried sums for those carried on (...)
    """
    chunk = entering.shape[-1]
    reach = torch.ones(chunk, chunk, dtype=torch.bool, device=entering.device).tril()
    fresh = ending = None
    if starts is not None:
        doc = starts.cumsum(-1)
        reach = reach & (doc.unsqueeze(-1) == doc.unsqueeze(-2))
        fresh, ending = doc > 0, doc == doc[..., -1:]
    if a is None:
        carry = torch.ones_like(entering) if fresh is None else ~fresh
        tail = entering if ending is None else entering & ending
        m, carry, tail = (x.float() for x in (reach & entering.unsqueeze(-2), carry, tail))
        return m, carry, tail, carry[..., -1]
    keep = F.logsigmoid(a).masked_fill(~entering, 0.0)
    take = F.logsigmoid(-a).masked_fill(~entering, float("-inf"))
    carry = keep.cumsum(-1)
    take = take - carry
    # One exponential of a difference: exp(b_i) and exp(-b_j) alone would overflow.
    m = (carry.unsqueeze(-1) + take.unsqueeze(-2)).masked_fill_(~reach, float("-inf")).exp_()
    tail = carry[..., -1:] + take
    if fresh is not None:
        carry = carry.masked_fill(fresh, float("-inf"))
        tail = tail.masked_fill(~ending, float("-inf"))
    carry = carry.exp()
    return m, carry, tail.exp(), carry[..., -1]


def scan(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    a: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
    chunk: int = 64,
    starts: Tensor | None = None,
    entering: Tensor | None = None,
):
    """The recurrence as matrix products over chunks, not yet normalised.

    phi_q, phi_k: (batch, heads, time, features); v: (batch, heads, time, head_dim)
    a: gate logits (batch, heads, time), or None for RFA without a gate
    state: s (batch, heads, features, head_dim + 1), c (batch, heads); or None for an empty past of which nothing is kept
    starts: bool (batch, time), true where a document begins: the state is zeroed before that token
    entering: bool (batch, time), false where the key of this step is nobody's; None where all enter
    -> phi_q S (batch, heads, time, head_dim), phi_q . z and c (batch, heads, time), and the state after the last token
    """
    b, h, t, f = phi_q.shape
    n = -(-t // chunk)
    pad = n * chunk - t
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if entering is None:
        entering = torch.ones(1, t, dtype=torch.bool, device=v.device)
    if pad:
        phi_q, phi_k, v = (F.pad(x, (0, 0, 0, pad)) for x in (phi_q, phi_k, v))
        entering = F.pad(entering, (0, pad))
        a = None if a is None else F.pad(a, (0, pad))
        starts = None if starts is None else F.pad(starts, (0, pad))
    split = lambda x: x.reshape(*x.shape[:2], n, chunk, *x.shape[3:])
    phi_q, phi_k, v, entering = split(phi_q), split(phi_k), split(v), split(entering.unsqueeze(1))
    m, carry, tail, decay = weights(None if a is None else split(a), entering, None if starts is None else split(starts.unsqueeze(1)))
    m, carry, tail, decay = (x.to(v.dtype) for x in (m, carry, tail, decay))

    out = torch.matmul(torch.matmul(phi_q, phi_k.transpose(-1, -2)) * m, v)
    c_all = m.detach().sum(-1).expand(b, h, n, chunk)
    after = None
    if state is not None or n > 1:
        add = torch.matmul(phi_k.transpose(-1, -2), v * tail.unsqueeze(-1))
        add_c = tail.sum(-1)
        s, c = state if state is not None else (v.new_zeros(b, h, f, v.shape[-1]), v.new_zeros(b, h))
        before_s, before_c = [], []
        for j in range(n):
            before_s.append(s)
            before_c.append(c)
            s = decay[:, :, j, None, None] * s + add[:, :, j]
            c = decay[:, :, j] * c + add_c[:, :, j]
        out = out + torch.matmul(phi_q, torch.stack(before_s, dim=2)) * carry.unsqueeze(-1)
        c_all = c_all + (carry * torch.stack(before_c, dim=2).unsqueeze(-1)).detach()
        after = None if state is None else (s, c)
    join = lambda x: x.reshape(b, h, n * chunk, *x.shape[4:])[:, :, :t]
    return join(out[..., :-1]), join(out[..., -1]), join(c_all), after


def chunked(phi_q: Tensor, phi_k: Tensor, v: Tensor, a: Tensor | None, state: tuple[Tensor, Tensor] | None, eps: float,
            chunk: int = 64, starts: Tensor | None = None):
    """`scan`, normalised: h (batch, heads, time, head_dim), and the state after the last token."""
    num, den, c, after = scan(phi_q, phi_k, v, a, state, chunk, starts)
    return normalise(num, den, c, eps), after


@dataclass
class RfaState(MixerState):
    """The sums over the past.

    s: (batch, heads, features, head_dim + 1), its last column is z; c: (batch, heads)
    conv: (batch, 3, conv_kernel - 1, heads * head_dim), the last inputs of the convolutions of q, k, v
    m: (batch, heads), the largest projection of a key so far, which favor's features are divided by
    """

    s: Tensor
    c: Tensor
    conv: Tensor | None = None
    m: Tensor | None = None


class RfaAttention(Attention):
    """Random feature attention, with a learned scalar gate per head (equation 7) or without (equation 5)."""

    State = RfaState

    def add_tensors(self, cfg: ModelConfig) -> None:
        h, d = cfg.num_attention_heads, cfg.head_dim
        if cfg.has_sigma:
            self.sigma = nn.Parameter(torch.ones(h, d))
        if cfg.proj_dim:
            self.random_matrices = features.draw_matrices(cfg.feature_map, (h, cfg.proj_dim, d))

    def empty(self, batch: int, device) -> RfaState:
        cfg = self.cfg
        h = cfg.num_attention_heads
        zeros = lambda *shape: torch.zeros(batch, h, *shape, device=device)
        return RfaState(zeros(cfg.features, cfg.head_dim + 1), zeros(), self.empty_conv(batch, device),
                        zeros() if cfg.feature_map == "favor" else None)

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        sums = None if state is None else (state.s, state.c)
        if self.cfg.feature_map == "favor":
            return self.mix_favor(q, k, v, a, state, starts, doc, chunk)
        if self.cfg.feature_map == "elu":
            phi_q, phi_k, eps = features.elu_features(q), features.elu_features(k), 0.0
        else:
            phi = features.gaussian_features if self.cfg.feature_map == "gaussian" else features.arc_cosine_features
            w = self.matrices()
            phi_q, phi_k, eps = phi(features.unit(q), w), phi(features.unit(k), w), self.cfg.denominator_eps
        out, sums = chunked(phi_q, phi_k, v, a, sums, eps, chunk, starts)
        return out, None if sums is None else RfaState(*sums)

    def mix_favor(self, q, k, v, a, state, starts, doc, chunk):
        """The features of keys are relative to a maximum that the state carries and rescales its sums by."""
        before = q.new_zeros(q.shape[:2]) if state is None else state.m
        out, sums, m = favor(q, k, v, a, None if state is None else (state.s, state.c), before, self.matrices(), chunk,
                             starts, doc)
        return out, None if sums is None else RfaState(*sums, m=m)


def favor(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, state: tuple[Tensor, Tensor] | None, before: Tensor, w: Tensor,
          chunk: int, starts: Tensor | None, doc: Tensor | None):
    """Chunked attention by positive features. before: (batch, heads), the maximum that s of `state` is relative to, and
    0 for an empty text; doc: the running count of `starts`; the rest as in `scan` -> h, the state and its maximum."""
    u, half = features.favor_exponents(k, w)
    m, rescale, last = features.favor_maximum(u, before, doc)
    phi_k = (u - (half + m)).exp() * (w.shape[-2] ** -0.5)
    if state is not None:
        state = state[0] * rescale[..., None, None], state[1]
    out, state = chunked(features.favor_features(q, w), phi_k, v, a, state, 0.0, chunk, starts)
    return out, state, last
