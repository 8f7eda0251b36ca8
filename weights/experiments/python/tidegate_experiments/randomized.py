"""Randomized attention (RA) and linear randomized attention (LARA), not causal (Zheng et al. 2022, arXiv 2204.04667).

Softmax attention is an expectation. With q and k scaled by d^(-1/4) and xi(x, w) = exp(w.x - |x|^2 / 2),

    softmax attention of q_n = E over p_n of f(w),   f(w) = sum_m xi(k_m, w) v_m / sum_m xi(k_m, w),
    p_n(w) = N(w; 0, I) xi(q_n, w) sum_m xi(k_m, w) / Z_n = sum_m softmax_m(q_n.k_m) N(w; q_n + k_m, I).

RA samples p_n itself, which is unbiased and costs queries x keys. LARA shares its samples among the queries: sample c comes
from a proposal N(mu_c, I) and is weighted for query n by alpha_nc p_n(w_c) / N(w_c; mu_c, I), self-normalised; the sums over
the keys are computed once per sample, so the cost is linear. Two other estimators are special cases (tests/test_randomized.py):

- proposals N(0, I) and constant weights alpha: RFA with positive features, whose random vectors are the samples;
- a proposal for each query that is the query's own mixture p_n, and alpha_nc = 1 for c = n, else 0: RA, sample by sample.
  (With all proposals equal to p_n, the balance heuristic gives RA too, averaged over the samples.)

All random numbers are arguments: standard normal ones, and for RA also uniform ones that choose a key. The mixers work on
(batch, heads, time, head_dim). The `plain_*` functions are their references: one head of one sequence, loops, no logarithms.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS = ("query-specific", "balance")
# Query-specific weights may be negative and are clamped here, because their logarithm is taken.
SMALLEST_WEIGHT = 1e-8


def scale(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies q and k by d^(-1/4), so that their products are softmax's exponents."""
    by = q.shape[-1] ** -0.25
    return q * by, k * by


def log_xi(x: Tensor, w: Tensor) -> Tensor:
    """Returns log xi = w.x - |x|^2 / 2, which is also log N(w; x, I) - log N(w; 0, I).

    x: (..., time, d), w: (..., samples, d) -> (..., samples, time)
    """
    return torch.matmul(w, x.transpose(-1, -2)) - 0.5 * x.square().sum(-1).unsqueeze(-2)


def choose_keys(q: Tensor, k: Tensor, uniform: Tensor, key_mask: Tensor | None) -> Tensor:
    """Draws a key for each query from softmax(q.k) by inverting the cumulative distribution. No gradient.

    q: (batch, heads, queries, d), k: (batch, heads, keys, d), both scaled; uniform: (batch, heads, queries) in [0, 1)
    -> indices (batch, heads, queries)
    """
    with torch.no_grad():
        scores = torch.matmul(q, k.transpose(-1, -2))
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None, :], float("-inf"))
        cumulative = scores.softmax(-1).cumsum(-1)
        total = cumulative[..., -1:]
        # Strictly below the total, or rounding could step onto a masked key at the end.
        at = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, at, right=True).squeeze(-1)


def ra(q: Tensor, k: Tensor, v: Tensor, uniform: Tensor, noise: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Randomized attention (equations 9 to 11), averaged over its samples: unbiased, in time and space of queries x keys.

    q: (batch, heads, queries, d); k, v: (batch, heads, keys, d); key_mask: bool (batch, keys), false for padding
    uniform: (samples, batch, heads, queries) in [0, 1); noise: (samples, batch, heads, queries, d), standard normal
    -> (batch, heads, queries, d)
    """
    q, k = scale(q, k)
    # xi is written as one product, so that PyTorch's attention can be used over w: [w, 1] . [k, -|k|^2 / 2].
    k_plus = torch.cat([k, -0.5 * k.square().sum(-1, keepdim=True)], dim=-1)
    mask = None if key_mask is None else key_mask[:, None, None, :]
    out = torch.zeros_like(q)
    for u, normal in zip(uniform, noise):
        chosen = choose_keys(q, k, u, key_mask)
        w = q + k.gather(2, chosen.unsqueeze(-1).expand_as(q)) + normal
        w_plus = torch.cat([w, torch.ones_like(w[..., :1])], dim=-1)
        out = out + F.scaled_dot_product_attention(w_plus, k_plus, v, attn_mask=mask, scale=1.0)
    return out / len(noise)


def count_landmarks(landmarks: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the number of landmarks of each sequence, at most its number of queries or keys. queries, keys: (batch) ->
    (batch)"""
    return torch.minimum(queries, keys).clamp(max=landmarks)


def segment_means(x: Tensor, mask: Tensor, count: Tensor, landmarks: int) -> Tensor:
    """Returns means over `count` segments of nearly equal length.

    Token i of n real ones is in segment floor(i * count / n). x: (batch, heads, time, d), mask: bool (batch, time), count:
    (batch) -> (batch, heads, landmarks, d), zero from `count` on
    """
    place = mask.long().cumsum(1) - 1
    segment = torch.div(place * count[:, None], mask.sum(1, keepdim=True), rounding_mode="floor").clamp(0, landmarks - 1)
    member = F.one_hot(segment, landmarks).to(x.dtype) * mask.unsqueeze(-1)  # (batch, time, landmarks)
    share = member / member.sum(1, keepdim=True).clamp_min(1.0)
    return torch.matmul(share.transpose(1, 2).unsqueeze(1), x)


def importance(q: Tensor, k: Tensor, v: Tensor, w: Tensor, log_ratio: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The self-normalised estimator behind LARA, RFA with positive features and RA; time linear in the tokens.

    q: (batch, heads, queries, d), k: (batch, heads, keys, d), both scaled; v: (batch, heads, keys, d)
    w: (batch, heads, samples, d)
    log_ratio: (batch, heads, samples, queries or 1), log of alpha_nc(w_c) N(w_c; 0, I) / proposal_c(w_c); -inf leaves a
        sample out
    -> (batch, heads, queries, d)
    """
    log_k = log_xi(k, w)
    if key_mask is not None:
        log_k = log_k.masked_fill(~key_mask[:, None, None, :], float("-inf"))
    total = log_k.logsumexp(-1, keepdim=True)
    f = torch.matmul((log_k - total).exp(), v)  # (batch, heads, samples, d)
    # |q|^2 / 2 is the same for all samples of a query, and cancels.
    log_weight = torch.matmul(w, q.transpose(-1, -2)) + total + log_ratio
    return torch.matmul(log_weight.softmax(-2).transpose(-1, -2), f)


def lara(q: Tensor, k: Tensor, v: Tensor, noise: Tensor, weights: str = "query-specific",
         key_mask: Tensor | None = None, query_mask: Tensor | None = None) -> Tensor:
    """Linear randomized attention (section 4): proposals N(q_c + k_c, I) at the means of segments of queries and of keys.

    q: (batch, heads, queries, d); k, v: (batch, heads, keys, d)
    masks: bool (batch, queries) and (batch, keys), false for padding
    noise: (batch or 1, heads or 1, samples per landmark, landmarks, d), standard normal; zeros put each sample at its mean
    weights: `balance`, alpha_c = N(w; mu_c, I) / sum_c' N(w; mu_c', I); or `query-specific`, alpha_nc = alpha_c + r_nc -
        (mean of r_nc over the landmarks c), at least 1e-8, which follows the weights of least variance (section 4.2).
        r_nc = exp(q_n.q_c) / sum_c' exp(q_n.q_c'), where q_c is the mean of a segment's queries: a softmax over the
        landmarks c, so that each query prefers the samples near itself.
    -> (batch, heads, queries, d). A sequence with fewer queries or keys than landmarks has only that many landmarks.

    The authors' published code (lara.py of HKUNLP/efficient-attention, "mis-opt") takes the same products, but its softmax
    is over the queries n. There r_nc is of the order 1 / queries, so for long sequences little but the balance heuristic is
    left. This function departs from that code on purpose. It also scales q and k before noise of unit variance is added,
    and learns no projection of the landmarks.
    """
    q, k = scale(q, k)
    whole = lambda x: torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    query_mask, keys = (whole(x) if mask is None else mask for x, mask in ((q, query_mask), (k, key_mask)))
    samples, landmarks = noise.shape[-3], noise.shape[-2]
    count = count_landmarks(landmarks, query_mask.sum(1), keys.sum(1))
    q_mean = segment_means(q, query_mask, count, landmarks)
    mu = q_mean + segment_means(k, keys, count, landmarks)
    absent = (torch.arange(landmarks, device=q.device) >= count[:, None])[:, None, :]  # (batch, 1, landmarks)
    w = (mu.unsqueeze(2) + noise).flatten(2, 3)  # (batch, heads, samples * landmarks, d)

    # The density of every sample under every proposal, relative to N(0, I): (..., samples * landmarks, landmarks)
    log_proposals = log_xi(mu, w).masked_fill(absent.unsqueeze(2), float("-inf"))
    log_mixture = log_proposals.logsumexp(-1, keepdim=True)
    if weights == "balance":
        log_ratio = -log_mixture
    elif weights == "query-specific":
        own = (w.unflatten(2, (samples, landmarks)) * mu.unsqueeze(2)).sum(-1) - 0.5 * mu.square().sum(-1).unsqueeze(2)
        own = own.flatten(2).unsqueeze(-1)
        near = torch.matmul(q_mean, q.transpose(-1, -2))
        near = near.masked_fill(absent.unsqueeze(-1), float("-inf")).softmax(-2)
        # (..., samples * landmarks, queries)
        near = (near - 1 / count.to(q.dtype)[:, None, None, None]).repeat(1, 1, samples, 1)
        log_ratio = ((own - log_mixture).exp() + near).clamp_min(SMALLEST_WEIGHT).log() - own
    else:
        raise ValueError(f"weights: expected one of {WEIGHTS}, found {weights!r}")
    log_ratio = log_ratio.masked_fill(absent.repeat(1, 1, samples).unsqueeze(-1), float("-inf"))
    return importance(q, k, v, w, log_ratio, key_mask)


def plain_xi(x: Tensor, w: Tensor) -> Tensor:
    """Returns xi(x, w) of two vectors (d)."""
    return torch.exp(w.dot(x) - x.dot(x) / 2)


def plain_f(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Returns f(w), the values averaged with the weights xi(k_m, w). k, v: (keys, d), w: (d) -> (d)"""
    top, bottom = torch.zeros_like(v[0]), torch.zeros_like(v[0, 0])
    for m in range(len(k)):
        top, bottom = top + plain_xi(k[m], w) * v[m], bottom + plain_xi(k[m], w)
    return top / bottom


def plain_ra(q: Tensor, k: Tensor, v: Tensor, uniform: Tensor, noise: Tensor) -> Tensor:
    """`ra` for one head. q: (queries, d), k, v: (keys, d), uniform: (samples, queries), noise: (samples, queries, d)"""
    q, k = scale(q, k)
    out = []
    for n in range(len(q)):
        probability = [torch.exp(q[n].dot(k[m])).item() for m in range(len(k))]
        total = torch.zeros_like(q[n])
        for s in range(len(noise)):
            below, chosen = 0.0, 0
            for m, p in enumerate(probability):
                below += p / sum(probability)
                if below > float(uniform[s, n]):
                    chosen = m
                    break
            total = total + plain_f(k, v, q[n] + k[chosen] + noise[s, n])
        out.append(total / len(noise))
    return torch.stack(out)


def plain_density(w: Tensor, mean: Tensor) -> Tensor:
    """Returns N(w; mean, I) of two vectors (d)."""
    return torch.exp(-(w - mean).dot(w - mean) / 2) / (2 * math.pi) ** (len(w) / 2)


def plain_lara(q: Tensor, k: Tensor, v: Tensor, noise: Tensor, weights: str) -> Tensor:
    """`lara` for one head without padding. q: (queries, d), k, v: (keys, d), noise: (samples, landmarks, d)"""
    q, k = scale(q, k)
    count = min(noise.shape[1], len(q), len(k))
    mean = lambda x, c: torch.stack([x[i] for i in range(len(x)) if i * count // len(x) == c]).mean(0)
    q_mean = [mean(q, c) for c in range(count)]
    mu = [q_mean[c] + mean(k, c) for c in range(count)]
    out = []
    for n in range(len(q)):
        near = torch.stack([torch.exp(q[n].dot(q_mean[c])) for c in range(count)])
        near = near / near.sum()
        top, bottom = torch.zeros_like(v[0]), torch.zeros_like(v[0, 0])
        for s in range(len(noise)):
            for c in range(count):
                w = mu[c] + noise[s, c]
                proposal = plain_density(w, mu[c])
                alpha = proposal / sum(plain_density(w, mu[i]) for i in range(count))
                if weights == "query-specific":
                    alpha = (alpha + near[c] - near.mean()).clamp_min(SMALLEST_WEIGHT)
                target = plain_density(w, torch.zeros_like(w)) * plain_xi(q[n], w)
                target = target * sum(plain_xi(k[m], w) for m in range(len(k)))
                weight = alpha * target / proposal
                top, bottom = top + weight * plain_f(k, v, w), bottom + weight
        out.append(top / bottom)
    return torch.stack(out)
