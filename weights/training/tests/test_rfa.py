"""The chunked form against the step-by-step reference, values and gradients, in f64."""

import pytest
import torch

from tidegate_training import features as maps
from tidegate_training import naive, rfa

EPS = 0.02


def inputs(seed: int, b: int, h: int, t: int, proj: int, d: int, gate: bool, sharp: float = 3.0):
    """Returns leaves in f64: q, k, v, random vectors, gate logits with a standard deviation of `sharp`, an empty carried
    state."""
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    leaves = {"q": rand(b, h, t, d), "k": rand(b, h, t, d), "v": rand(b, h, t, d), "w": rand(h, proj, d)}
    if gate:
        leaves["a"] = sharp * rand(b, h, t)
    # The carried state, empty until `warm` fills it: c is the weight of a text, and z sums features with that weight.
    leaves["s"] = torch.zeros(b, h, 2 * proj, d + 1, dtype=torch.float64)
    leaves["c"] = torch.zeros(b, h, dtype=torch.float64)
    for x in leaves.values():
        x.requires_grad_()
    return leaves


def features(x):
    return (maps.gaussian_features(maps.unit(x[n]), x["w"]) for n in ("q", "k"))


def documents(starts, t: int):
    """Returns (from, to, whether it begins a document) for each piece of a row."""
    cuts = sorted({0, t} | {i for i in range(t) if starts is not None and starts[i]})
    return [(i, j, starts is not None and bool(starts[i])) for i, j in zip(cuts, cuts[1:])]


def truth(x, starts=None):
    """Runs `naive.recurrent` row by row; the state is zeroed by hand at each start."""
    phi_q, phi_k = features(x)
    outs, states = [], []
    for row in range(x["v"].shape[0]):
        s, c = x["s"][row : row + 1], x["c"][row : row + 1]
        pieces = []
        for i, j, fresh in documents(None if starts is None else starts[row], x["v"].shape[2]):
            if fresh:
                s, c = torch.zeros_like(s), torch.zeros_like(c)
            cut = lambda y: y[row : row + 1, :, i:j]
            out, (s, c) = naive.recurrent(cut(phi_q), cut(phi_k), cut(x["v"]), cut(x["a"]) if "a" in x else None, (s, c), EPS)
            pieces.append(out)
        outs.append(torch.cat(pieces, dim=2))
        states.append((s, c))
    return torch.cat(outs), (torch.cat([s for s, _ in states]), torch.cat([c for _, c in states]))


def fast(x, chunk: int, starts=None):
    phi_q, phi_k = features(x)
    return rfa.chunked(phi_q, phi_k, x["v"], x.get("a"), (x["s"], x["c"]), EPS, chunk, starts)


def warm(x, other):
    """Gives `x` the state that the text of `other` leaves."""
    with torch.no_grad():
        _, (s, c) = truth(other)
        x["s"].copy_(s)
        x["c"].copy_(c)
    return x


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("t", [1, 15, 64, 131])
def test_the_chunked_form_agrees_with_the_recurrence(t, chunk, gate):
    seed = 1000 * t + chunk
    shape = (2, 3, t, 10, 6, gate)
    x = warm(inputs(seed, *shape), inputs(seed + 1, *shape))
    starts = torch.rand(2, t, generator=torch.Generator().manual_seed(seed)) < 0.1
    for where in (None, starts):
        for got, want in zip(torch.utils._pytree.tree_leaves(fast(x, chunk, where)), torch.utils._pytree.tree_leaves(truth(x, where))):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("with_starts", [True, False])
def test_gradients_agree(gate, with_starts):
    grads = []
    for form in (lambda x, st: fast(x, 16, st), truth):
        x = warm(inputs(5, 2, 2, 40, 8, 5, gate), inputs(6, 2, 2, 40, 8, 5, gate))
        starts = torch.zeros(2, 40, dtype=torch.bool)
        starts[0, [0, 7, 16, 33]] = True
        out, (s, c) = form(x, starts if with_starts else None)
        (out.square().sum() + s.sum() + 2 * c.square().sum()).backward()
        grads.append({n: p.grad for n, p in x.items()})
    for name, want in grads[1].items():
        torch.testing.assert_close(grads[0][name], want, rtol=1e-7, atol=1e-9, msg=lambda m: f"{name}: {m}")
        assert want.abs().max() > 0, name


def test_products_in_bf16_stay_near_those_in_f32():
    """Values and gradients; sums, weights and denominators stay in f32, so only single products differ."""
    x = {n: y.detach().float().requires_grad_() for n, y in inputs(7, 2, 2, 130, 64, 32, True).items()}
    starts = torch.zeros(2, 130, dtype=torch.bool)
    starts[0, 70] = True
    found = []
    for products in (torch.float32, torch.bfloat16):
        phi_q, phi_k = features(x)
        num, den, _, (s, _) = rfa.scan(phi_q, phi_k, x["v"], x["a"], (x["s"], x["c"]), 16, starts, products=products)
        assert num.dtype == den.dtype == s.dtype == torch.float32
        grads = torch.autograd.grad(num.square().sum() + den.square().sum() + s.square().sum(), [x[n] for n in ("q", "k", "v", "a")])
        found.append([num, den, s, *grads])
    for f32, bf16 in zip(*found):
        error = (bf16 - f32).norm() / f32.norm()
        assert 0 < error < 0.01, error


@pytest.mark.parametrize("logit", [-30.0, 30.0])
def test_a_saturated_gate_stays_finite(logit):
    x = inputs(1, 1, 2, 100, 8, 4, True)
    with torch.no_grad():
        x["a"].fill_(logit)
    out, _ = fast(x, 64)
    want, _ = truth(x)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-9)
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in x.values() if p.grad is not None)


def test_no_gradient_through_a_clamped_denominator():
    num, den = torch.ones(3, 4, requires_grad=True), torch.tensor([-0.5, 0.001, 0.9], requires_grad=True)
    c = torch.ones(3, requires_grad=True)
    out = rfa.normalise(num, den, c, EPS)
    out.sum().backward()
    torch.testing.assert_close(out[:, 0].detach(), torch.tensor([50.0, 50.0, 1 / 0.9]))
    assert den.grad[:2].tolist() == [0.0, 0.0] and den.grad[2] < 0 and c.grad is None


def test_a_denominator_of_0_gives_0_and_no_gradient():
    num = torch.tensor([[0.0, 0.0], [3.0, 6.0]], requires_grad=True)
    den = torch.tensor([0.0, 2.0], requires_grad=True)
    out = rfa.normalise(num, den, torch.ones(2), 0.0)
    (1e3 * out).sum().backward()
    assert out.tolist() == [[0.0, 0.0], [1.5, 3.0]]
    assert num.grad.tolist() == [[0.0, 0.0], [500.0, 500.0]] and den.grad.tolist() == [0.0, -2250.0]


def test_unit_has_a_finite_gradient_at_zero():
    x = torch.zeros(2, 3, requires_grad=True)
    maps.unit(x).sum().backward()
    assert torch.isfinite(x.grad).all()
