"""The RFA-Gate recurrence in PyTorch: feature map, chunked form, and the plain step-by-step truth.

Peng et al., "Random Feature Attention" (ICLR 2021), equations 5 to 7. The same mathematics is in the
Rust crate `tidegate-model` (`ops/naive.rs`, `ops/chunk.rs`); golden fixtures tie the two together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT_EPS = 1e-3


def unit(x: Tensor) -> Tensor:
    """x / (|x| + 1e-3) over the last dimension; written so that the gradient at zero is finite."""
    norm = (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    return x / (norm + UNIT_EPS)


def gaussian_features(x: Tensor, w: Tensor) -> Tensor:
    """sqrt(1/D) [sin(W x), cos(W x)].

    x: (batch, heads, time, head_dim), w: (heads, proj_dim, head_dim) -> (batch, heads, time, 2 * proj_dim)
    """
    u = torch.matmul(x, w.transpose(-1, -2))
    return torch.cat([u.sin(), u.cos()], dim=-1) * (w.shape[-2] ** -0.5)


def normalise(num: Tensor, den: Tensor, c: Tensor, eps: float) -> Tensor:
    """num / max(den, eps * c); no gradient through the denominator where the clamp holds. Where the gates took nothing
    in, den and c are 0 and so is the result.

    num: (..., head_dim), den and c: (...)
    """
    held = torch.maximum(den, eps * c.detach()).clamp_min(torch.finfo(den.dtype).tiny)
    return num / held.unsqueeze(-1)


def recurrent(phi_q: Tensor, phi_k: Tensor, v: Tensor, a: Tensor | None, state: tuple[Tensor, Tensor], eps: float):
    """One token after another: the truth that `chunked` is tested against. Shapes as in `chunked`."""
    s, c = state
    out = []
    for t in range(v.shape[2]):
        g = torch.sigmoid(a[:, :, t]) if a is not None else torch.ones_like(c)
        i = torch.sigmoid(-a[:, :, t]) if a is not None else torch.ones_like(c)
        v_plus = torch.cat([v[:, :, t], torch.ones_like(v[:, :, t, :1])], dim=-1)
        s = g[..., None, None] * s + i[..., None, None] * phi_k[:, :, t, :, None] * v_plus[:, :, None, :]
        c = g * c + i
        o = torch.einsum("bhf,bhfe->bhe", phi_q[:, :, t], s)
        out.append(normalise(o[..., :-1], o[..., -1], c, eps))
    return torch.stack(out, dim=2), (s, c)


def chunked(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    a: Tensor | None,
    state: tuple[Tensor, Tensor],
    eps: float,
    chunk: int = 64,
    starts: Tensor | None = None,
):
    """The recurrence as matrix products over chunks, in f32.

    phi_q, phi_k: (batch, heads, time, 2 * proj_dim); v: (batch, heads, time, head_dim)
    a: gate logits (batch, heads, time), or None for RFA without a gate
    state: s (batch, heads, 2 * proj_dim, head_dim + 1), c (batch, heads)
    starts: bool (batch, time), true where a document begins: the state is zeroed before that token
    -> h (batch, heads, time, head_dim), and the state after the last token
    """
    b, h, t, f = phi_q.shape
    n = -(-t // chunk)
    pad = n * chunk - t
    v_plus = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if a is None:
        keep = torch.zeros(b, h, t, device=v.device, dtype=torch.float32)
        take = keep
    else:
        keep, take = F.logsigmoid(a), F.logsigmoid(-a)
    if pad:
        # A padded token keeps everything (log gate 0) and adds nothing (log weight -inf).
        phi_q, phi_k, v_plus = (F.pad(x, (0, 0, 0, pad)) for x in (phi_q, phi_k, v_plus))
        keep = F.pad(keep, (0, pad))
        take = F.pad(take, (0, pad), value=float("-inf"))
    split = lambda x: x.reshape(b, h, n, chunk, *x.shape[3:])
    phi_q, phi_k, v_plus, keep, take = (split(x) for x in (phi_q, phi_k, v_plus, keep, take))
    cum = keep.cumsum(-1)

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    log_m = cum.unsqueeze(-1) - cum.unsqueeze(-2) + take.unsqueeze(-2)
    carry, tail = cum, cum[..., -1:] - cum + take
    if starts is None:
        log_m = log_m.masked_fill(~causal, float("-inf"))
        decay = carry[..., -1].exp()
    else:
        doc = F.pad(starts, (0, pad)).reshape(b, 1, n, chunk).cumsum(-1)
        log_m = log_m.masked_fill(~(causal & (doc.unsqueeze(-1) == doc.unsqueeze(-2))), float("-inf"))
        carry = carry.masked_fill(doc > 0, float("-inf"))
        tail = tail.masked_fill(doc != doc[..., -1:], float("-inf"))
        decay = carry[..., -1].exp()
    m, carry, tail = log_m.exp(), carry.exp(), tail.exp()

    scores = torch.matmul(phi_q, phi_k.transpose(-1, -2)) * m
    out = torch.matmul(scores, v_plus)
    add = torch.matmul((phi_k * tail.unsqueeze(-1)).transpose(-1, -2), v_plus)
    add_c = tail.sum(-1)

    s, c = state
    before_s, before_c = [], []
    for j in range(n):
        before_s.append(s)
        before_c.append(c)
        s = decay[:, :, j, None, None] * s + add[:, :, j]
        c = decay[:, :, j] * c + add_c[:, :, j]
    out = out + torch.matmul(phi_q * carry.unsqueeze(-1), torch.stack(before_s, dim=2))
    c_all = m.sum(-1) + carry * torch.stack(before_c, dim=2).unsqueeze(-1)
    out = normalise(out[..., :-1], out[..., -1], c_all, eps)
    return out.reshape(b, h, n * chunk, -1)[:, :, :t], (s, c)
