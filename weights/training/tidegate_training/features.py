"""Feature maps: what makes `phi(q) . phi(k)` stand for a similarity, and the random matrices behind them.

gaussian    sqrt(1/D) [sin(W u), cos(W u)], u of unit length, W = sigma * W~      Peng et al. 2021, equation 2
arc_cosine  sqrt(1/D) ReLU(W u), u and W as above                                 Peng et al. 2021, section 2.2
elu         x + 1 where x > 0, else exp(x); nothing is drawn                      Katharopoulos et al. 2020, equation 7
favor       sqrt(1/D) exp(W y - |y|^2 / 2 - m), y = x / d^(1/4)                   Choromanski et al. 2021, lemma 1

Shapes: x (batch, heads, time, head_dim), w (heads, proj_dim, head_dim) -> (batch, heads, time, features).
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_EPS = 1e-3


def unit(x: Tensor) -> Tensor:
    """x / (|x| + 1e-3) over the last dimension; written so that the gradient at zero is finite."""
    norm = (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    return x / (norm + UNIT_EPS)


def gaussian_features(x: Tensor, w: Tensor) -> Tensor:
    """sqrt(1/D) [sin(W x), cos(W x)], of 2 * proj_dim features; E[phi(x) . phi(y)] = exp(-|sigma (x - y)|^2 / 2)."""
    u = torch.matmul(x, w.transpose(-1, -2))
    return torch.cat([u.sin(), u.cos()], dim=-1) * (w.shape[-2] ** -0.5)


def arc_cosine_features(x: Tensor, w: Tensor) -> Tensor:
    """sqrt(1/D) ReLU(W x), of proj_dim features.

    E[phi(x) . phi(y)] = |sx| |sy| (sin t + (pi - t) cos t) / (2 pi), t the angle between sx = sigma x and sy.
    """
    return torch.matmul(x, w.transpose(-1, -2)).relu() * (w.shape[-2] ** -0.5)


def elu_features(x: Tensor) -> Tensor:
    """x + 1 where x > 0, else exp(x), of head_dim features; as it is written, and not as `elu(x) + 1`, it stays positive
    in f32 far below zero."""
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def favor_exponents(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """W y (batch, heads, time, proj_dim) and |y|^2 / 2 (batch, heads, time, 1), for y = x / d^(1/4)."""
    y = x * x.shape[-1] ** -0.25
    return torch.matmul(y, w.transpose(-1, -2)), y.square().sum(-1, keepdim=True) / 2


def favor_features(x: Tensor, w: Tensor, maximum: Tensor | None = None) -> Tensor:
    """sqrt(1/D) exp(W y - |y|^2 / 2 - m), of proj_dim features.

    maximum: m, broadcast to (batch, heads, time, 1); None is each vector's own largest projection, which suits queries:
    there the factor exp(-m) cancels in the normaliser.
    """
    u, half = favor_exponents(x, w)
    m = u.detach().amax(-1, keepdim=True) if maximum is None else maximum
    return (u - (half + m)).exp() * (w.shape[-2] ** -0.5)


def favor_maximum(u: Tensor, before: Tensor, doc: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum that all keys of one document share within a segment: it cancels, so it may be known beforehand.

    u: (batch, heads, time, proj_dim), before: (batch, heads), what the state carries, doc: (batch, time), 0 for the
    tokens that go on with the state's document -> m of each token (batch, heads, time, 1), the factor that brings the
    carried sums to the first document's maximum (batch, heads), and the last document's maximum (batch, heads)
    """
    largest = u.detach().amax(-1)
    if doc is None:
        m = torch.maximum(before, largest.amax(-1))
        return m[..., None, None], (before - m).exp(), m
    # One place for each document that a segment may hold; a fresh document begins at 0.
    places = largest.new_zeros(*before.shape, u.shape[2] + 1)
    places[..., 0] = before
    index = doc[:, None, :].expand_as(largest)
    places = places.scatter_reduce(-1, index, largest, "amax")
    m = places.gather(-1, index)
    return m.unsqueeze(-1), (before - places[..., 0]).exp(), m[..., -1]


def draw_matrices(feature_map: str, shape: tuple[int, int, int], generator: torch.Generator | None = None) -> Tensor:
    """Random matrices (heads, proj_dim, head_dim) for a map: independent N(0, 1), or orthogonal for favor."""
    return (orthogonal_matrices if feature_map == "favor" else torch.randn)(*shape, generator=generator)


def orthogonal_matrices(heads: int, proj_dim: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Each row is distributed as N(0, I), the rows of a block of `dim` are orthogonal: (heads, proj_dim, dim).

    Choromanski et al. 2021, section 2.4: less variance than independent rows, and still unbiased.
    """
    blocks = -(-proj_dim // dim)
    q, r = torch.linalg.qr(torch.randn(heads, blocks, dim, dim, generator=generator))
    # Without the signs the factor would not be uniform over the rotations.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    # The columns are as orthogonal as the rows; the norms are those of independent rows: chi with `dim` degrees.
    norms = torch.randn(heads, blocks * dim, dim, generator=generator).norm(dim=-1, keepdim=True)
    return (q.transpose(-1, -2).reshape(heads, blocks * dim, dim) * norms)[:, :proj_dim].contiguous()
