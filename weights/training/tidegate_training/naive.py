"""Reference forms of every causal mixer, plain and slow: one token after another, one document at a time.

The fast forms in `rfa.py`, `softmax.py` and `hybrid.py` are tested against them. Shapes: q, k, v (batch, heads, time,
head_dim), a (batch, heads, time) or None, s (batch, heads, features, head_dim + 1) with z as its last column, c (batch,
heads).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .features import favor_exponents


def add(s: Tensor, c: Tensor, phi_k: Tensor, v: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns S, z and c after one more token (equations 5 and 7 of Peng et al. 2021).

    phi_k: (batch, heads, features), v: (batch, heads, head_dim), a: (batch, heads)
    """
    g = torch.sigmoid(a) if a is not None else torch.ones_like(c)
    i = torch.sigmoid(-a) if a is not None else torch.ones_like(c)
    v_plus = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    s = g[..., None, None] * s + i[..., None, None] * phi_k[..., :, None] * v_plus[..., None, :]
    return s, g * c + i


def read(phi_q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Returns phi_q S and phi_q . z. phi_q: (batch, heads, features)"""
    o = torch.einsum("bhf,bhfe->bhe", phi_q, s)
    return o[..., :-1], o[..., -1]


def divided(num: Tensor, den: Tensor, floor: Tensor) -> Tensor:
    """Returns num / max(den, floor) for each row, and 0 if the divisor is 0.

    num: (batch, heads, head_dim), den and floor: (batch, heads)
    """
    rows = []
    for n, d, f in zip(num.flatten(0, 1), den.flatten(), floor.detach().flatten()):
        by = d if d > f else f
        rows.append(n / by if by > 0 else torch.zeros_like(n))
    return torch.stack(rows).view_as(num)


def recurrent(phi_q: Tensor, phi_k: Tensor, v: Tensor, a: Tensor | None, state: tuple[Tensor, Tensor], eps: float):
    """RFA on the given features (batch, heads, time, features) -> h, (s, c)"""
    s, c = state
    out = []
    for t in range(v.shape[2]):
        s, c = add(s, c, phi_k[:, :, t], v[:, :, t], None if a is None else a[:, :, t])
        num, den = read(phi_q[:, :, t], s)
        out.append(divided(num, den, eps * c))
    return torch.stack(out, dim=2), (s, c)


def favor(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, state: tuple[Tensor, Tensor, Tensor], w: Tensor):
    """Streaming FAVOR+ -> h, (s, c, m).

    m is the largest logarithm of a feature among the keys so far, starting with the first key's own. When a key raises it,
    the sums are rescaled.
    """
    s, c, m = state
    scale = w.shape[-2] ** -0.5
    out = []
    for t in range(v.shape[2]):
        u, half = favor_exponents(k[:, :, t : t + 1], w)
        exponents = (u - half)[:, :, 0]
        own = exponents.detach().amax(-1)
        risen = torch.where(c == 0, own, torch.maximum(m, own))
        s = s * torch.where(c == 0, 0.0, torch.exp(m - risen))[..., None, None]
        m = risen
        s, c = add(s, c, scale * torch.exp(exponents - m[..., None]), v[:, :, t], None if a is None else a[:, :, t])
        u, half = favor_exponents(q[:, :, t : t + 1], w)
        exponents = (u - half)[:, :, 0]
        num, den = read(scale * torch.exp(exponents - exponents.detach().amax(-1, keepdim=True)), s)
        out.append(divided(num, den, torch.zeros_like(den)))
    return torch.stack(out, dim=2), (s, c, m)


def softmax(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Softmax attention over a whole document; each query sees the last `window` tokens."""
    out = []
    for t in range(v.shape[2]):
        near = slice(max(0, t + 1 - window), t + 1)
        scores = torch.einsum("bhd,bhjd->bhj", q[:, :, t], k[:, :, near]) / q.shape[-1] ** 0.5
        out.append(torch.einsum("bhj,bhjd->bhd", scores.softmax(-1), v[:, :, near]))
    return torch.stack(out, dim=2)


def hybrid(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, features: tuple[Tensor, Tensor], far_bias: Tensor, eps: float,
           window: int):
    """Hybrid attention over a whole document: the last `window` tokens by softmax, older ones by RFA with the given
    `features` (phi_q, phi_k) -> h, (s, c)"""
    phi_q, phi_k = features
    b, h, _, d = q.shape
    s, c = phi_k.new_zeros(b, h, phi_k.shape[-1], d + 1), phi_k.new_zeros(b, h)
    out = []
    for t in range(v.shape[2]):
        left = t - window
        if left >= 0:
            s, c = add(s, c, phi_k[:, :, left], v[:, :, left], None if a is None else a[:, :, left])
        near = slice(max(0, left + 1), t + 1)
        e = torch.exp(torch.einsum("bhd,bhjd->bhj", q[:, :, t], k[:, :, near]) / d**0.5)
        num, den = torch.einsum("bhj,bhjd->bhd", e, v[:, :, near]), e.sum(-1)
        if left >= 0:
            far, far_den = read(phi_q[:, :, t], s)
            weight, floor = torch.exp(far_bias), eps * c.detach()
            num = num + weight[:, None] * far
            den = den + weight * torch.where(far_den > floor, far_den, floor)
        out.append(num / den[..., None])
    return torch.stack(out, dim=2), (s, c)
