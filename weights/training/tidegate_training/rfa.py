"""Random feature attention: the recurrence in its chunked form, and the mixer around it, with any feature map.

Peng et al., "Random Feature Attention" (ICLR 2021), equations 5 to 7. The Rust crate `tidegate-model` computes the same
(`mixers/rfa/naive.rs`, `mixers/rfa/chunk.rs`); golden fixtures compare the two. The step-by-step reference is in
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
    """Returns num / max(den, eps * c), without a gradient through a clamped denominator.

    num: (..., head_dim), den and c: (...)

    Maps without negative features (all but gaussian) need no clamp, because the result is a mean of values however small
    den is; their eps is 0. If the divisor is 0, because query and keys share no feature or the gates let nothing in, the
    result is 0 without a gradient.
    """
    tiny = torch.finfo(den.dtype).tiny
    clamped = torch.maximum(den, eps * c.detach()).unsqueeze(-1)
    none = clamped <= tiny
    # A divisor of 0 must be kept out of the gradient: 1 / tiny times a few is infinite, and that times 0 is NaN.
    return torch.where(none, num.detach() / tiny, num / clamped.masked_fill(none, 1.0))


@dataclass
class Reach:
    """Masks that say which tokens of a chunk see which, all bool.

    entering: (..., chunk), whether the step adds a key to the sums
    pairs: (..., chunk, chunk), whether each token's query (row) sees each token's key (column)
    fresh: (..., chunk), whether a document has started in the chunk, at or before the token
    ending: (..., chunk), whether the token belongs to the document of the chunk's last token
    fresh and ending are None if no document starts.
    """

    entering: Tensor
    pairs: Tensor
    fresh: Tensor | None = None
    ending: Tensor | None = None

    @staticmethod
    def of(entering: Tensor, starts: Tensor | None) -> Reach:
        """Builds the masks of all chunks.

        entering: (batch or 1, 1, chunks, chunk), false if a step adds nothing and forgets nothing; starts: as `entering`
        """
        chunk = entering.shape[-1]
        past = torch.ones(chunk, chunk, dtype=torch.bool, device=entering.device).tril() & entering.unsqueeze(-2)
        if starts is None:
            return Reach(entering, past)
        doc = starts.cumsum(-1)
        return Reach(entering, past & (doc.unsqueeze(-1) == doc.unsqueeze(-2)), doc > 0, doc == doc[..., -1:])


def weights(a: Tensor | None, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weights of keys within each chunk, and of the sums that are carried between chunks.

    a: (batch, heads, chunks, chunk), gate logits, or None
    -> the weight of each key for each query (..., chunk, chunk); of the sums from earlier chunks for each query (...,
    chunk); of each key in the sums that the chunk passes on (..., chunk)
    """
    entering, fresh, ending = reach.entering, reach.fresh, reach.ending
    if a is None:
        carry = torch.ones_like(entering) if fresh is None else ~fresh
        tail = entering if ending is None else entering & ending
        return reach.pairs.float(), carry.float(), tail.float()
    keep = F.logsigmoid(a).masked_fill(~entering, 0.0)
    take = F.logsigmoid(-a).masked_fill(~entering, float("-inf"))
    carry = keep.cumsum(-1)
    take = take - carry
    # The exponential is taken of the difference, because those of its two terms could overflow.
    m = (carry.unsqueeze(-1) + take.unsqueeze(-2)).masked_fill_(~reach.pairs, float("-inf")).exp_()
    tail = carry[..., -1:] + take
    if fresh is not None:
        carry = carry.masked_fill(fresh, float("-inf"))
        tail = tail.masked_fill(~ending, float("-inf"))
    return m, carry.exp(), tail.exp()


def relative(counted: tuple[Tensor, Tensor, Tensor], maxima: Tensor, before: Tensor, reach: Reach):
    """Rescales `weights` for keys whose features are relative to their own maximum.

    What a query reads, and the sums that a chunk passes on, become relative to the largest maximum among the keys in them.

    maxima: (batch, heads, chunks, chunk); before: (batch, heads), the maximum of the carried sums, -inf if they are empty
    -> the weights, and the maximum after the last chunk
    """
    m, carry, tail = counted
    none = float("-inf")
    local = maxima.unsqueeze(-2).masked_fill(~reach.pairs, none).amax(-1)
    at_start = []
    for j in range(maxima.shape[2]):
        at_start.append(before)
        kept = before if reach.fresh is None else before.masked_fill(reach.fresh[:, :, j, -1], none)
        before = torch.maximum(kept, local[:, :, j, -1])
    seen = torch.stack(at_start, dim=2).unsqueeze(-1)
    seen = seen if reach.fresh is None else seen.masked_fill(reach.fresh, none)
    largest = torch.maximum(local, seen)
    # Keys that a query does not see have weight 0, but their difference may be positive and its exponential infinite.
    factor = lambda x, y: (x - y).clamp_max(0).exp()
    return (m * factor(maxima.unsqueeze(-2), largest.unsqueeze(-1)), carry * factor(seen, largest),
            tail * factor(maxima, largest[..., -1:])), before


def scan(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    a: Tensor | None,
    state: tuple[Tensor, ...] | None,
    chunk: int = 64,
    starts: Tensor | None = None,
    entering: Tensor | None = None,
    maxima: Tensor | None = None,
    products: torch.dtype | None = None,
):
    """Computes the recurrence as matrix products over chunks, not yet normalized.

    phi_q, phi_k: (batch, heads, time, features); v: (batch, heads, time, head_dim)
    a: gate logits (batch, heads, time), or None for RFA without a gate
    state: s (batch, heads, features, head_dim + 1), c (batch, heads); or None for an empty past, and then no state is
    returned
    starts: bool (batch, time), true where a document begins: the state is zeroed before that token
    entering: bool (batch, time), false if this step has no key; None if all have one
    maxima: (batch, heads, time), the maximum that each key's features are relative to, or None. With maxima, the state has
    a third part: the largest of its keys' maxima (batch, heads), of any value while c is 0
    products: the dtype of the matrix products, if not that of their inputs; weights and sums keep theirs
    -> phi_q S (batch, heads, time, head_dim), phi_q . z and c (batch, heads, time), and the state after the last token
    """
    b, h, t, f = phi_q.shape
    n = -(-t // chunk)
    pad = n * chunk - t
    product = lambda x, y: torch.matmul(x.to(products or x.dtype), y.to(products or y.dtype)).to(v.dtype)
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
    reach = Reach.of(entering, None if starts is None else split(starts.unsqueeze(1)))
    counted = sums = tuple(x.to(v.dtype) for x in weights(None if a is None else split(a), reach))
    last = None
    if maxima is not None:
        # With c = 0 nothing has been seen, and the maximum is meaningless.
        last = v.new_full((b, h), float("-inf")) if state is None else state[2].masked_fill(state[1] <= 0, float("-inf"))
        sums, last = relative(counted, split(F.pad(maxima, (0, pad))), last, reach)
    (m, carry, tail), (m_c, carry_c, tail_c) = sums, counted

    out = product(product(phi_q, phi_k.transpose(-1, -2)) * m, v)
    c_all = m_c.detach().sum(-1).expand(b, h, n, chunk)
    after = None
    if state is not None or n > 1:
        add = product(phi_k.transpose(-1, -2), v * tail.unsqueeze(-1))
        add_c = tail_c.sum(-1)
        s, c = state[:2] if state is not None else (v.new_zeros(b, h, f, v.shape[-1]), v.new_zeros(b, h))
        before_s, before_c = [], []
        for j in range(n):
            before_s.append(s)
            before_c.append(c)
            s = carry[:, :, j, -1, None, None] * s + add[:, :, j]
            c = carry_c[:, :, j, -1] * c + add_c[:, :, j]
        out = out + product(phi_q, torch.stack(before_s, dim=2)) * carry.unsqueeze(-1)
        c_all = c_all + (carry_c * torch.stack(before_c, dim=2).unsqueeze(-1)).detach()
        after = None if state is None else (s, c) if last is None else (s, c, last)
    join = lambda x: x.reshape(b, h, n * chunk, *x.shape[4:])[:, :, :t]
    return join(out[..., :-1]), join(out[..., -1]), join(c_all), after


def chunked(phi_q: Tensor, phi_k: Tensor, v: Tensor, a: Tensor | None, state: tuple[Tensor, ...] | None, eps: float,
            chunk: int = 64, starts: Tensor | None = None, maxima: Tensor | None = None, products: torch.dtype | None = None):
    """Runs `scan` and normalizes: returns h (batch, heads, time, head_dim), and the state after the last token."""
    num, den, c, after = scan(phi_q, phi_k, v, a, state, chunk, starts, maxima=maxima, products=products)
    return normalise(num, den, c, eps), after


@dataclass
class RfaState(MixerState):
    """The sums over the past.

    s: (batch, heads, features, head_dim + 1), the last column is z; c: (batch, heads)
    conv: (batch, 3, conv_kernel - 1, heads * head_dim), the last inputs of the convolutions of q, k, v
    m: (batch, heads), only for favor: the logarithm of the largest feature of a key so far, which s is relative to; 0 if
    empty
    """

    s: Tensor
    c: Tensor
    conv: Tensor | None = None
    m: Tensor | None = None


class RfaAttention(Attention):
    """Random feature attention, with a learned scalar gate per head (equation 7) or without a gate (equation 5)."""

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
        cfg, maxima = self.cfg, None
        w = self.matrices() if cfg.proj_dim else None
        if cfg.feature_map == "favor":
            phi_q, (phi_k, maxima) = features.favor_features(q, w), features.favor_relative(k, w)
        else:
            phi_q, phi_k = (features.features_of(cfg.feature_map, x, w) for x in (q, k))
        sums = None if state is None else (state.s, state.c) if maxima is None else (state.s, state.c, state.m)
        out, sums = chunked(phi_q, phi_k, v, a, sums, cfg.denominator_floor, chunk, starts, maxima, self.products)
        return out, None if sums is None else RfaState(*sums[:2], m=sums[2] if maxima is not None else None)
