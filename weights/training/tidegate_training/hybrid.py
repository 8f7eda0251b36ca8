"""Hybrid attention: softmax over near tokens and random features for far ones, with one normalizer.

The last `sliding_window` tokens are attended to exactly; all older ones are kept as the sums S, z and c. Each token counts
once: it enters the sums, under its own gate, when it leaves the window. The step-by-step reference is in `naive.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import features, rfa, softmax
from .attention import Attention, MixerState
from .config import ModelConfig


@dataclass
class HybridState(MixerState):
    """The sums over the far past, and the tokens that have not entered them yet.

    s: (batch, heads, features, head_dim + 1), the last column is z; c: (batch, heads)
    k, v: (batch, heads, sliding_window, head_dim), the newest last, zeros for empty places
    a: (batch, heads, sliding_window), the gate logits of those tokens; None without a gate
    filled: (batch), int64, the number of tokens in the window
    conv: as in `RfaState`
    """

    s: Tensor
    c: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    filled: Tensor
    conv: Tensor | None = None


def combine(scores: Tensor, value: Tensor, far: tuple[Tensor, Tensor, Tensor], far_bias: Tensor, eps: float) -> Tensor:
    """Combines the window's scores and the far sums under one normalizer.

    scores: (batch, heads, chunks, chunk, keys), -inf for keys that a query does not see
    value: (batch, heads, chunks, keys, d)
    far: phi_q S (batch, heads, time, d), phi_q . z and c (batch, heads, time); far_bias: (heads)
    -> (batch, heads, time, d)
    """
    num_far, den_far, c = far
    b, h, t, d = num_far.shape
    bias = far_bias[None, :, None].expand(b, h, t).masked_fill(c <= 0, float("-inf"))
    largest = scores.detach().amax(-1).reshape(b, h, -1)
    pad = largest.shape[-1] - t
    mu = torch.maximum(largest[..., :t], bias.detach())
    e = (scores - nn.functional.pad(mu, (0, pad)).view(*scores.shape[:-1], 1)).exp()
    num = torch.matmul(e, value).reshape(b, h, -1, d)[:, :, :t]
    den = e.sum(-1).reshape(b, h, -1)[:, :, :t]
    weight = (bias - mu).exp()
    num = num + weight.unsqueeze(-1) * num_far
    den = den + weight * torch.maximum(den_far, eps * c.detach())
    return num / den.clamp_min(torch.finfo(den.dtype).tiny).unsqueeze(-1)


@dataclass
class Inputs:
    """The inputs of both parts.

    q: (batch, heads, time, d)
    k, v, a: keys, values and gate logits of the `window` tokens before the segment and of the segment's own: (batch, heads,
    window + time, ...)
    doc: (batch, window + time), the document of each of those tokens, -1 for an empty place
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    doc: Tensor
    starts: Tensor | None


def attend(x: Inputs, sums: tuple[Tensor, Tensor] | None, w: Tensor, far_bias: Tensor, eps: float, window: int,
           chunk: int = 64):
    """Attends to the window by softmax and to all older tokens by random features.

    w: (heads, proj_dim, head_dim); sums: s and c, or None for an empty past, and then None is returned for the sums
    -> out (batch, heads, time, d), and the sums after the last token
    """
    t = x.q.shape[2]
    scores, value = softmax.window_scores(x.q, x.k, x.v, x.doc, window, chunk, past=sums is not None)
    # Step t adds token t - window if it is in the same document.
    phi = lambda y: features.gaussian_features(features.unit(y), w)
    a = None if x.a is None else x.a[:, :, :t]
    entering = x.doc[:, :t] == x.doc[:, window:]
    *far, sums = rfa.scan(phi(x.q), phi(x.k[:, :, :t]), x.v[:, :, :t], a, sums, chunk, x.starts, entering)
    return combine(scores, value, far, far_bias, eps), sums


class HybridAttention(Attention):
    """Softmax over a sliding window, and RFA, gated or not, over all older tokens."""

    State = HybridState

    def add_tensors(self, cfg: ModelConfig) -> None:
        h, d = cfg.num_attention_heads, cfg.head_dim
        self.sigma = nn.Parameter(torch.ones(h, d))
        # Logarithm of the far part's weight relative to the window's e^s, because a kernel of unit vectors has no scale of
        # its own.
        self.far_bias = nn.Parameter(torch.zeros(h))
        self.random_matrices = features.draw_matrices(cfg.feature_map, (h, cfg.proj_dim, d))

    def empty(self, batch: int, device) -> HybridState:
        cfg = self.cfg
        h, d, window = cfg.num_attention_heads, cfg.head_dim, cfg.sliding_window
        zeros = lambda *shape: torch.zeros(batch, h, *shape, device=device)
        return HybridState(zeros(cfg.features, d + 1), zeros(), zeros(window, d), zeros(window, d),
                           zeros(window) if cfg.gate else None, torch.zeros(batch, dtype=torch.long, device=device),
                           self.empty_conv(batch, device))

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        window, (b, _, t, _) = self.cfg.sliding_window, q.shape
        past = (None,) * 4 if state is None else (state.k, state.v, state.a, state.filled)
        doc = softmax.documents(past[3], doc, window, b, t, q.device)
        k, v = softmax.with_past(k, past[0], window), softmax.with_past(v, past[1], window)
        a = None if a is None else softmax.with_past(a, past[2], window)
        sums = None if state is None else (state.s, state.c)
        out, sums = attend(Inputs(q, k, v, a, doc, starts), sums, self.matrices(), self.far_bias, self.cfg.denominator_eps,
                           window, chunk)
        if state is None:
            return out, None
        filled = softmax.filled_after(doc, window)
        kept = (None if x is None else softmax.keep(x, filled, window) for x in (k, v, a))
        return out, HybridState(*sums, *kept, filled)
