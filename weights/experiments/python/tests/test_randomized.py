"""RA and LARA: the fast forms against the plain ones, unbiasedness, and the two special cases of LARA."""

import pytest
import torch
import torch.nn.functional as F

from tidegate_experiments import randomized as r
from tidegate_training import features, rfa


def inputs(seed: int, b: int = 2, h: int = 2, queries: int = 7, keys: int = 9, d: int = 4, size: float = 1.5) -> dict:
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *shape: size * torch.randn(*shape, generator=gen, dtype=torch.float64)
    x = {"q": rand(b, h, queries, d), "k": rand(b, h, keys, d), "v": rand(b, h, keys, d)}
    return {n: t.requires_grad_() for n, t in x.items()}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks(x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns masks: row 0 has no padding; row 1 has padding at the end of queries and keys, and a masked key in the
    middle."""
    query, key = (torch.ones(x[n].shape[0], x[n].shape[2], dtype=torch.bool) for n in ("q", "k"))
    query[1, -2:], key[1, -2:], key[1, 2] = False, False, False
    return query, key


def compare(x: dict, fast, plain) -> None:
    """Compares values and gradients; `plain` gets (row, head) and returns the outputs of that row's real queries."""
    query, _ = masks(x)
    out, grads = [], []
    for form in ("fast", "plain"):
        for t in x.values():
            t.grad = None
        if form == "fast":
            y = fast()
            rows = [y[i, j][query[i]] for i in range(y.shape[0]) for j in range(y.shape[1])]
        else:
            rows = [plain(i, j) for i in range(x["q"].shape[0]) for j in range(x["q"].shape[1])]
        y = torch.cat(rows)
        (y * normal(9, *y.shape)).sum().backward()
        out.append(y.detach())
        grads.append({n: t.grad for n, t in x.items()})
    torch.testing.assert_close(out[0], out[1], rtol=1e-9, atol=1e-10)
    for n in x:
        torch.testing.assert_close(grads[0][n], grads[1][n], rtol=1e-8, atol=1e-10, msg=lambda m: f"{n}: {m}")
        assert grads[1][n].abs().max() > 1e-3, n


def head(x: dict, i: int, j: int):
    """Returns q, k and v of one head of a row, without padding."""
    query, key = masks(x)
    return x["q"][i, j][query[i]], x["k"][i, j][key[i]], x["v"][i, j][key[i]]


@pytest.mark.parametrize("queries, keys", [(7, 9), (9, 9), (5, 6)])
def test_ra_agrees_with_the_plain_form(queries, keys):
    x = inputs(1, queries=queries, keys=keys)
    query, key = masks(x)
    u, noise = uniform(2, 3, 2, 2, queries), normal(3, 3, 2, 2, queries, 4)
    plain = lambda i, j: r.plain_ra(*head(x, i, j), u[:, i, j][:, query[i]], noise[:, i, j][:, query[i]])
    compare(x, lambda: r.ra(x["q"], x["k"], x["v"], u, noise, key), plain)


@pytest.mark.parametrize("weights", r.WEIGHTS)
@pytest.mark.parametrize("samples, landmarks, queries, keys",
                         [(1, 3, 7, 9), (2, 4, 9, 9), (1, 7, 9, 8), (2, 1, 7, 9), (1, 12, 7, 9)])
def test_lara_agrees_with_the_plain_form(samples, landmarks, queries, keys, weights):
    x = inputs(4, queries=queries, keys=keys)
    query, key = masks(x)
    noise = normal(5, 2, 2, samples, landmarks, 4)
    compare(x, lambda: r.lara(x["q"], x["k"], x["v"], noise, weights, key, query),
            lambda i, j: r.plain_lara(*head(x, i, j), noise[i, j], weights))


def test_padding_has_no_effect_and_no_gradient():
    x = inputs(6)
    query, key = masks(x)
    u, noise = uniform(7, 1, 2, 2, 7), normal(8, 1, 2, 2, 7, 4)
    forms = [lambda: r.ra(x["q"], x["k"], x["v"], u, noise, key)]
    forms += [lambda w=w: r.lara(x["q"], x["k"], x["v"], noise[0, :, :, None, :3], w, key, query) for w in r.WEIGHTS]
    for form in forms:
        for t in x.values():
            t.grad = None
        before = form()[:, :, :5]
        before.sum().backward()
        assert all((x[n].grad.transpose(1, 2)[~key] == 0).all() for n in "kv")
        y = {n: t.detach().clone() for n, t in x.items()}
        with torch.no_grad():
            for n in "kv":
                x[n].transpose(1, 2)[~key] = 50.0
            x["q"].transpose(1, 2)[~query] = 50.0
            torch.testing.assert_close(form()[:, :, :5], before.detach())
            for n in x:
                x[n].copy_(y[n])


def test_large_inputs_stay_finite():
    # Exponents reach several thousand, so their exponentials must never be formed.
    x = inputs(10, queries=40, keys=50, d=16, size=40.0)
    noise = normal(11, 2, 2, 1, 8, 16)
    outs = [r.lara(x["q"], x["k"], x["v"], noise, w) for w in r.WEIGHTS]
    outs.append(r.ra(x["q"], x["k"], x["v"], uniform(12, 1, 2, 2, 40), normal(13, 1, 2, 2, 40, 16)))
    for out in outs:
        for t in x.values():
            t.grad = None
        out.sum().backward()
        assert torch.isfinite(out).all() and all(torch.isfinite(t.grad).all() for t in x.values())


def test_a_masked_key_is_never_chosen():
    q, k = torch.randn(1, 1, 64, 4), torch.randn(1, 1, 8, 4)
    mask = torch.arange(8)[None] < 5
    last = torch.full((1, 1, 64), 1.0 - 2.0**-24)
    assert r.choose_keys(q, k, last, mask).max() == 4
    assert r.choose_keys(q, k, torch.zeros(1, 1, 64), mask).max() == 0


# Tests of the mean of many draws.

DRAWS = 40_000


def one_head(d: int = 4):
    """Returns three queries and six keys whose softmax is neither flat nor a single key, as a batch of one."""
    x = inputs(20, 1, 1, 3, 6, d, size=1.2)
    return tuple(x[n].detach() for n in "qkv")


def deviation(draws: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns (mean - target) in standard errors. draws: (draws, 1, queries, d)"""
    return (draws.mean(0) - target) / (draws.std(0) / len(draws) ** 0.5)


def test_ra_is_unbiased_and_rfa_is_not():
    q, k, v = one_head()
    exact = F.scaled_dot_product_attention(q, k, v)[0]
    many = lambda t: t.expand(DRAWS, *t.shape[1:])

    z = deviation(r.ra(many(q), many(k), many(v), uniform(21, 1, DRAWS, 1, 3), normal(22, 1, DRAWS, 1, 3, 4)), exact)
    assert z.abs().max() < 4 and 0.3 < z.square().mean() < 2.5, z

    # RFA with positive features, 1 and 4 random vectors, drawn anew for every draw.
    for count in (1, 4):
        qs, ks = r.scale(many(q), many(k))
        w = normal(23, DRAWS, 1, count, 4)
        z = deviation(r.importance(qs, ks, many(v), w, torch.zeros(DRAWS, 1, count, 1)), exact)
        assert z.abs().max() > 20, (count, z)

    # RFA with sine and cosine, whose target is softmax over the products of the unit vectors.
    qu, ku = features.unit(q), features.unit(k)
    kernel = torch.exp(-(qu.unsqueeze(-2) - ku.unsqueeze(-3)).square().sum(-1) / 2)
    target = torch.matmul(kernel, v)[0] / kernel.sum(-1, keepdim=True)[0]
    for count in (2, 8):
        w = normal(24, DRAWS, count, 4)
        phi_q, phi_k = (features.gaussian_features(u[0, 0], w).unsqueeze(1) for u in (qu, ku))  # (draws, 1, time, 2 * count)
        den = torch.matmul(phi_q, phi_k.sum(-2, keepdim=True).transpose(-1, -2)).squeeze(-1)
        num = torch.matmul(phi_q, torch.matmul(phi_k.transpose(-1, -2), v))
        z = deviation(rfa.normalise(num, den, torch.full_like(den, 6.0), 0.02), target)
        assert z.abs().max() > 6, (count, z)


@pytest.mark.parametrize("weights", r.WEIGHTS)
def test_lara_tends_to_softmax_as_samples_grow(weights):
    # The keys of a segment are spread around the negative of its query, so that all proposals are equal. Then every balance
    # weight is 1/3, no query-specific weight is negative (and clamped), and the query-specific weights differ from 1/3 as
    # much as the queries differ from one another.
    q, _, v = one_head()
    q, spread = 0.6 * q, 0.4 * normal(25, 1, 1, 3, 4)
    k = torch.stack([0.3 + spread - q, 0.3 - spread - q], dim=-2).flatten(2, 3)
    exact = F.scaled_dot_product_attention(q, k, v)
    error = [(r.lara(q, k, v, normal(26, 1, 1, n, 3, 4), weights) - exact).abs().max() for n in (1, 100_000)]
    assert error[1] < 0.02 < error[0], error


# The two special cases of LARA.


@pytest.mark.parametrize("samples", [1, 5, 32])
def test_lara_becomes_rfa_with_standard_proposals(samples):
    x = inputs(30)
    q, k = r.scale(x["q"], x["k"])
    w = normal(31, 2, 2, samples, 4)
    phi = lambda t: torch.exp(torch.einsum("bhcd,bhtd->bhtc", w, t) - t.square().sum(-1, keepdim=True) / 2) * samples**-0.5
    phi_q, phi_k = phi(q), phi(k)
    top = torch.einsum("bhnc,bhmc,bhmd->bhnd", phi_q, phi_k, x["v"])
    want = top / torch.einsum("bhnc,bhmc->bhn", phi_q, phi_k).unsqueeze(-1)
    constant = torch.full((2, 2, samples, 1), -3.0, dtype=torch.float64)
    torch.testing.assert_close(r.importance(q, k, x["v"], w, constant), want, rtol=1e-9, atol=1e-11)


def test_lara_becomes_ra_with_a_proposal_for_each_query():
    # One proposal for each query: proposal c is the mixture p_c of query c, and alpha_nc = 1 where c = n, else 0.
    x = inputs(32)
    u, noise = uniform(33, 1, 2, 2, 7), normal(34, 1, 2, 2, 7, 4)
    q, k = r.scale(x["q"], x["k"])
    chosen = r.choose_keys(q, k, u[0], None)
    w = q + k.gather(2, chosen.unsqueeze(-1).expand_as(q)) + noise[0]
    log_proposal = mixture(q, k, w).diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    log_alpha = torch.eye(7, dtype=torch.float64).log()
    got = r.importance(q, k, x["v"], w, log_alpha - log_proposal)
    torch.testing.assert_close(got, r.ra(x["q"], x["k"], x["v"], u, noise), rtol=1e-9, atol=1e-11)


def test_lara_becomes_ra_with_the_mixture_of_one_query():
    # All proposals equal the mixture of the only query, so the weights of the balance heuristic are all equal.
    x = inputs(35, queries=1)
    u, noise = uniform(36, 6, 2, 2, 1), normal(37, 6, 2, 2, 1, 4)
    q, k = r.scale(x["q"], x["k"])
    key = lambda a: k.gather(2, r.choose_keys(q, k, a, None).unsqueeze(-1).expand_as(q))
    w = torch.cat([q + key(a) + b for a, b in zip(u, noise)], dim=2)
    got = r.importance(q, k, x["v"], w, -mixture(q, k, w))
    torch.testing.assert_close(got, r.ra(x["q"], x["k"], x["v"], u, noise), rtol=1e-9, atol=1e-11)


def mixture(q, k, w):
    """Returns log(p_n(w_c) / N(w_c; 0, I)): (..., samples, queries).

    p_n is the sum over keys of softmax(q.k) N(w; q + k, I).
    """
    log_pi = torch.matmul(q, k.transpose(-1, -2)).log_softmax(-1)  # (..., queries, keys)
    means = (q.unsqueeze(-2) + k.unsqueeze(-3)).flatten(2, 3)
    each = r.log_xi(means, w).unflatten(-1, (q.shape[2], k.shape[2]))
    return (log_pi.unsqueeze(2) + each).logsumexp(-1)
