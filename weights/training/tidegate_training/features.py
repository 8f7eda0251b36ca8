"""Feature maps, whose products `phi(q) . phi(k)` estimate a similarity, and their random matrices.

gaussian    sqrt(1/D) [sin(W u), cos(W u)], u of unit length, W = sigma * W~      Peng et al. 2021, equation 2
arc_cosine  sqrt(1/D) ReLU(W u), u and W as above                                 Peng et al. 2021, section 2.2
elu         x + 1 where x > 0, else exp(x); no random numbers                     Katharopoulos et al. 2020, equation 7
favor       sqrt(1/D) exp(W y - |y|^2 / 2 - m), y = x / d^(1/4)                   Choromanski et al. 2021, lemma 1

Shapes: x (batch, heads, time, head_dim), w (heads, proj_dim, head_dim) -> (batch, heads, time, features).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

UNIT_EPS = 1e-3


def unit(x: Tensor) -> Tensor:
    """x / (|x| + 1e-3) over the last dimension; written so that the gradient at zero is finite."""
    norm = (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    return x / (norm + UNIT_EPS)


def gaussian_features(x: Tensor, w: Tensor) -> Tensor:
    """Returns sqrt(1/D) [sin(W x), cos(W x)], 2 * proj_dim features; E[phi(x) . phi(y)] = exp(-|sigma (x - y)|^2 / 2)."""
    u, scale = torch.matmul(x, w.transpose(-1, -2)), w.shape[-2] ** -0.5
    if u.is_cuda:
        # When PyTorch 2.11.0 compiles SineCosine for a GPU, its gradients are exactly 0.
        return torch.cat([u.sin(), u.cos()], dim=-1) * scale
    return SineCosine.apply(u, scale)


class SineCosine(torch.autograd.Function):
    """scale [sin(u), cos(u)] along the last dimension.

    Each is the derivative of the other, up to the sign, so the backward pass reuses both; autograd would recompute them.
    """

    @staticmethod
    def forward(ctx, u: Tensor, scale: float) -> Tensor:
        phi = torch.cat([u.sin(), u.cos()], dim=-1).mul_(scale)
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (phi,) = ctx.saved_tensors
        sin, cos = phi.chunk(2, dim=-1)
        by_sin, by_cos = grad.chunk(2, dim=-1)
        return torch.addcmul(by_sin * cos, by_cos, sin, value=-1), None


def arc_cosine_features(x: Tensor, w: Tensor) -> Tensor:
    """Returns sqrt(1/D) ReLU(W x), proj_dim features.

    E[phi(x) . phi(y)] = |sx| |sy| (sin t + (pi - t) cos t) / (2 pi), t the angle between sx = sigma x and sy.
    """
    return torch.matmul(x, w.transpose(-1, -2)).relu() * (w.shape[-2] ** -0.5)


def elu_features(x: Tensor) -> Tensor:
    """Returns x + 1 where x > 0, else exp(x), head_dim features.

    Unlike `elu(x) + 1`, this form stays positive in f32 far below zero.
    """
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def features_of(feature_map: str, x: Tensor, w: Tensor | None) -> Tensor:
    """Returns the features of queries or keys for any map but favor, which needs a maximum.

    w: the random matrices times sigma, if the map has one; None for elu
    """
    if feature_map == "elu":
        return elu_features(x)
    return {"gaussian": gaussian_features, "arc_cosine": arc_cosine_features}[feature_map](unit(x), w)


def favor_exponents(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns W y (batch, heads, time, proj_dim) and |y|^2 / 2 (batch, heads, time, 1), for y = x / d^(1/4)."""
    y = x * x.shape[-1] ** -0.25
    return torch.matmul(y, w.transpose(-1, -2)), y.square().sum(-1, keepdim=True) / 2


def favor_relative(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sqrt(1/D) exp(W y - |y|^2 / 2 - m) and m, the largest exponent of each vector: (batch, heads, time, proj_dim)
    and (batch, heads, time).

    The largest feature of every vector is therefore sqrt(1/D), however long the vector is. The maximum is taken over whole
    exponents. Published FAVOR+ takes it over W y alone, which for a long key is far above its exponents: the key's features
    vanish, and so do those of all keys that share the maximum. For that reason FAVOR+ adds 1e-6 to each feature.
    """
    u, half = favor_exponents(x, w)
    largest = u.detach().amax(-1, keepdim=True)
    # |y|^2 / 2 is also part of m and cancels, so only its gradient is kept: subtracting a large value would cost u its low
    # digits.
    phi = (u - largest - (half - half.detach())).exp() * (w.shape[-2] ** -0.5)
    return phi, (largest - half.detach()).squeeze(-1)


def favor_features(x: Tensor, w: Tensor, maximum: Tensor | None = None) -> Tensor:
    """Returns sqrt(1/D) exp(W y - |y|^2 / 2 - m), proj_dim features.

    maximum: m, broadcast to (batch, heads, time, 1); None for each vector's own largest exponent, which suits queries:
    their factor exp(-m) cancels in the normalization
    """
    if maximum is None:
        return favor_relative(x, w)[0]
    u, half = favor_exponents(x, w)
    return (u - (half + maximum)).exp() * (w.shape[-2] ** -0.5)


def numbers(seed: int, purpose: str) -> torch.Generator:
    """Returns a seed's random generator for one purpose. What is drawn for other purposes does not change its numbers."""
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(purpose.encode()))


def draw_matrices(feature_map: str, shape: tuple[int, int, int], generator: torch.Generator | None = None) -> Tensor:
    """Draws random matrices (heads, proj_dim, head_dim) for a map: independent N(0, 1), or orthogonal for favor."""
    return (orthogonal_matrices if feature_map == "favor" else torch.randn)(*shape, generator=generator)


def orthogonal_matrices(heads: int, proj_dim: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws matrices (heads, proj_dim, dim) whose rows each follow N(0, I) and are orthogonal within each block of `dim`
    rows.

    Choromanski et al. 2021, section 2.4: less variance than independent rows, and still unbiased.
    """
    blocks = -(-proj_dim // dim)
    q, r = torch.linalg.qr(torch.randn(heads, blocks, dim, dim, generator=generator))
    # Without the sign correction, q would not be uniformly distributed over the orthogonal matrices.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    # The columns of q, which become the rows, are orthogonal too. Their norms are drawn as for independent rows: chi with
    # `dim` degrees of freedom.
    norms = torch.randn(heads, blocks * dim, dim, generator=generator).norm(dim=-1, keepdim=True)
    return (q.transpose(-1, -2).reshape(heads, blocks * dim, dim) * norms)[:, :proj_dim].contiguous()
