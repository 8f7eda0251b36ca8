"""Tests of feature maps as estimates: their kernels, FAVOR+ against exact softmax, and the random matrices."""

import math

import pytest
import torch

from tidegate_training import features


def favor_error(proj_dim: int, seed: int, norms: str, dim: int = 16, length: int = 512) -> float:
    """Returns the mean absolute error against exact softmax attention; queries, keys and values are all N(0, 1)."""
    gen = torch.Generator().manual_seed(100 + seed)
    q, k, v = (torch.randn(1, 1, length, dim, generator=gen, dtype=torch.float64) for _ in range(3))
    w = features.orthogonal_matrices(1, proj_dim, dim, gen).double()
    if norms == "sqrt(d)":
        w = w * (dim**0.5 / w.norm(dim=-1, keepdim=True))
    u, _ = features.favor_exponents(k, w)
    a = features.favor_features(q, w) @ features.favor_features(k, w, u.max()).transpose(-1, -2)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return ((a @ v) / a.sum(-1, keepdim=True) - exact).abs().mean().item()


@pytest.mark.parametrize("norms", ["sqrt(d)", "chi(d)"])
@torch.no_grad()
def test_the_error_of_favor_falls_with_the_number_of_features(norms):
    at = [sum(favor_error(n, seed, norms) for seed in range(12)) / 12 for n in (64, 256, 1024)]
    assert at == sorted(at, reverse=True), at
    # Norms that follow chi(d) are unbiased and heavy-tailed, so the error falls more slowly than with equal norms.
    assert at[2] < (0.75 if norms == "sqrt(d)" else 0.9) * at[0], at
    if norms == "sqrt(d)":
        assert 0.03 < at[0] < 0.06 and 0.02 < at[2] < 0.04, at


@torch.no_grad()
def test_rows_of_a_block_are_orthogonal_and_their_norms_chi():
    w = features.orthogonal_matrices(300, 20, 8, torch.Generator().manual_seed(1))
    assert w.shape == (300, 20, 8)
    for block in (w[:, :8], w[:, 8:16], w[:, 16:]):
        gram = block @ block.transpose(-1, -2)
        gram.diagonal(dim1=-2, dim2=-1).zero_()
        assert gram.abs().max() < 1e-4
    # E[chi^2] = d; the variance of the mean over 6,000 rows is 2 d / 6000.
    assert abs(w.square().sum(-1).mean().item() - 8) < 5 * math.sqrt(16 / 6000)
    assert w.norm(dim=-1).std() > 0.5
    # Each entry by itself is N(0, 1), and no direction is preferred.
    assert abs(w.mean().item()) < 5 / math.sqrt(300 * 8) / math.sqrt(20) * 3
    assert abs(w.square().mean(dim=(0, 1)) - 1).max() < 0.15


@pytest.mark.parametrize("name", ["gaussian", "arc_cosine", "favor"])
@torch.no_grad()
def test_the_kernels_are_estimated_without_bias(name):
    gen = torch.Generator().manual_seed(4)
    x, y = (0.5 * torch.randn(1, 1, 1, 6, generator=gen, dtype=torch.float64) for _ in range(2))
    w = torch.randn(1, 200_000, 6, generator=gen, dtype=torch.float64)
    if name == "gaussian":
        phi, want = features.gaussian_features, math.exp(-(x - y).square().sum().item() / 2)
    elif name == "arc_cosine":
        size = (x.norm() * y.norm()).item()
        t = math.acos((x * y).sum().item() / size)
        phi, want = features.arc_cosine_features, size * (math.sin(t) + (math.pi - t) * math.cos(t)) / (2 * math.pi)
    else:
        # The softmax kernel itself, exp(x . y / sqrt(d)), of vectors that are not normalized.
        phi = lambda z, w: features.favor_features(z, w, torch.zeros(1))
        want = math.exp((x * y).sum().item() / 6**0.5)
    products = (phi(x, w) * phi(y, w) * w.shape[1]).flatten()
    if name == "gaussian":
        products = products[: w.shape[1]] + products[w.shape[1] :]
    error = products.std().item() / w.shape[1] ** 0.5
    assert abs(products.mean().item() - want) < 4 * error, (products.mean().item(), want, error)
    assert error < 0.05 * want


@torch.no_grad()
def test_elu_stays_positive_far_below_zero():
    x = torch.tensor([-60.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(features.elu_features(x), torch.tensor([math.exp(-60), math.exp(-1), 1.0, 3.0]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["gaussian", "arc_cosine", "favor", "elu"])
def test_gradients_are_those_of_finite_differences(name):
    gen = torch.Generator().manual_seed(6)
    x, w = (torch.randn(*s, generator=gen, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 3, 4), (2, 5, 4)))
    maps = {"gaussian": features.gaussian_features, "arc_cosine": features.arc_cosine_features,
            "favor": lambda x, w: features.favor_features(x, w, torch.zeros(1)), "elu": lambda x, w: features.elu_features(x)}
    assert torch.autograd.gradcheck(maps[name], (x, w))
