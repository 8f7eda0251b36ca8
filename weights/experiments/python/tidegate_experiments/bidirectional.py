"""Attention that is not causal, over one sequence or from one to another: softmax, RFA with any feature map, RA and LARA.

All share one interface. Shapes are (batch, heads, time, head_dim), with a mask of the keys. Softmax and RA cost queries x
keys; RFA and LARA are linear in both. `plain_attend` is the reference for one head of one sequence: loops, no padding, no
maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidegate_training import features
from tidegate_training.config import FEATURE_MAPS
from tidegate_training.rfa import normalise

from . import randomized

ATTENTIONS = ("softmax", "rfa", "ra", "lara")


@dataclass(frozen=True)
class MixerConfig:
    """The kind of attention and its sizes.

    proj_dim: the number of rfa's random vectors
    denominator_eps: the floor of gaussian's denominators, which may be negative, as a share of the number of keys; the
    other maps have no negative features and need no floor
    samples: the number of ra's draws, which are averaged
    landmarks: the number of lara's proposals, with one sample each; lara_weights: one of `randomized.WEIGHTS`
    """

    attention: str = "softmax"
    feature_map: str = "gaussian"
    proj_dim: int = 32
    denominator_eps: float = 0.02
    samples: int = 1
    landmarks: int = 16
    lara_weights: str = "query-specific"

    def __post_init__(self):
        for name, known in (("attention", ATTENTIONS), ("feature_map", FEATURE_MAPS), ("lara_weights", randomized.WEIGHTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {known}, found {getattr(self, name)!r}")
        for name in ("proj_dim", "samples", "landmarks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")


@dataclass(frozen=True)
class Random:
    """The random numbers of an attention; None for those it does not use.

    w: for rfa except elu, the random matrices times sigma (heads, proj_dim, head_dim)
    uniform: for ra (samples, batch, heads, queries)
    noise: for ra (samples, batch, heads, queries, head_dim); for lara (batch or 1, heads or 1, samples per landmark,
    landmarks, head_dim)
    """

    w: Tensor | None = None
    uniform: Tensor | None = None
    noise: Tensor | None = None


def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, eps: float, key_mask: Tensor | None = None) -> Tensor:
    """Returns phi_q (phi_k^T v) / max(phi_q . sum phi_k, eps * keys), in time linear in the tokens.

    phi_q: (batch, heads, queries, features), phi_k: (batch, heads, keys, features), v: (batch, heads, keys, head_dim)
    """
    if key_mask is None:
        count = torch.full_like(v[:, :1, :1, 0], v.shape[2])
    else:
        phi_k = phi_k * key_mask[:, None, :, None]
        count = key_mask.sum(1).to(v.dtype)[:, None, None]
    v_plus = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    out = torch.matmul(phi_q, torch.matmul(phi_k.transpose(-1, -2), v_plus))
    return normalise(out[..., :-1], out[..., -1], count, eps)


def feature_pair(feature_map: str, q: Tensor, k: Tensor, w: Tensor | None, key_mask: Tensor | None = None):
    """Returns phi(q) and phi(k); favor's phi(k) is relative to the largest feature of all unmasked keys."""
    if feature_map == "elu":
        return features.elu_features(q), features.elu_features(k)
    if feature_map == "favor":
        phi_k, maxima = features.favor_relative(k, w)
        if key_mask is not None:
            maxima = maxima.masked_fill(~key_mask[:, None, :], float("-inf"))
        return features.favor_features(q, w), phi_k * (maxima - maxima.amax(-1, keepdim=True)).exp().unsqueeze(-1)
    phi = features.gaussian_features if feature_map == "gaussian" else features.arc_cosine_features
    return phi(features.unit(q), w), phi(features.unit(k), w)


def attend(cfg: MixerConfig, q: Tensor, k: Tensor, v: Tensor, random: Random, key_mask: Tensor | None = None,
           query_mask: Tensor | None = None) -> Tensor:
    """Attends from every query to every key with the attention of `cfg`.

    q: (batch, heads, queries, head_dim); k, v: (batch, heads, keys, head_dim)
    key_mask: bool (batch, keys), false for padding; each row needs at least one key
    query_mask: bool (batch, queries), used only by lara, whose landmarks are means of real queries; outputs at padded
    queries are finite and meaningless
    -> (batch, heads, queries, head_dim)
    """
    if cfg.attention == "softmax":
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if cfg.attention == "ra":
        return randomized.ra(q, k, v, random.uniform, random.noise, key_mask)
    if cfg.attention == "lara":
        return randomized.lara(q, k, v, random.noise, cfg.lara_weights, key_mask, query_mask)
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
    phi_q, phi_k = feature_pair(cfg.feature_map, q, k, random.w, key_mask)
    eps = cfg.denominator_eps if cfg.feature_map == "gaussian" else 0.0
    return linear_attention(phi_q, phi_k, v, eps, key_mask)


class Mixer(nn.Module):
    """A module that holds the tensors of `attend`: rfa's sigma (learned) and random matrices (fixed).

    RA and LARA draw new samples in training. In evaluation, LARA's samples are the means of their proposals and RA's come
    from a fixed seed, so that equal inputs give equal outputs.
    """

    def __init__(self, cfg: MixerConfig, heads: int, head_dim: int):
        super().__init__()
        self.cfg = cfg
        self.sigma = None
        if cfg.attention == "rfa" and cfg.feature_map != "elu":
            if cfg.feature_map != "favor":
                self.sigma = nn.Parameter(torch.ones(heads, head_dim))
            shape = (heads, cfg.proj_dim, head_dim)
            self.register_buffer("random_matrices", features.draw_matrices(cfg.feature_map, shape))

    def random(self, q: Tensor) -> Random:
        """Returns the random numbers of one pass. q: (batch, heads, queries, head_dim)"""
        cfg, (b, h, n, d) = self.cfg, q.shape
        if cfg.attention == "rfa" and cfg.feature_map != "elu":
            w = self.random_matrices
            return Random(w=w if self.sigma is None else w * self.sigma[:, None, :])
        if cfg.attention == "lara":
            shape = (b, h, 1, cfg.landmarks, d)
            return Random(noise=(torch.randn if self.training else torch.zeros)(shape, device=q.device))
        if cfg.attention == "ra":
            generator = None if self.training else torch.Generator(q.device).manual_seed(0)
            make = lambda form, *shape: form(cfg.samples, b, h, n, *shape, device=q.device, generator=generator)
            return Random(uniform=make(torch.rand), noise=make(torch.randn, d))
        return Random()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None,
                query_mask: Tensor | None = None) -> Tensor:
        """Calls `attend` with the random numbers of this pass."""
        return attend(self.cfg, q, k, v, self.random(q), key_mask, query_mask)


def plain_kernel(feature_map: str, q: Tensor, k: Tensor, w: Tensor | None) -> Tensor:
    """Returns phi(q) . phi(k) of two vectors (d), computed as the estimate of a kernel. w: (proj_dim, d)"""
    if feature_map == "elu":
        positive = lambda x: torch.stack([x_i + 1 if x_i > 0 else x_i.exp() for x_i in x])
        return (positive(q) * positive(k)).sum()
    if feature_map == "favor":
        q, k = q * len(q) ** -0.25, k * len(k) ** -0.25
        return sum(randomized.plain_xi(q, row) * randomized.plain_xi(k, row) for row in w) / len(w)
    q, k = (x / (x.dot(x).sqrt() + 1e-3) for x in (q, k))
    if feature_map == "gaussian":
        return sum(torch.cos(row.dot(q - k)) for row in w) / len(w)
    return sum(row.dot(q).clamp_min(0) * row.dot(k).clamp_min(0) for row in w) / len(w)


def plain_attend(cfg: MixerConfig, q: Tensor, k: Tensor, v: Tensor, random: Random) -> Tensor:
    """`attend` for one head of one sequence: q (queries, d), k and v (keys, d), random numbers without batch and heads."""
    if cfg.attention == "ra":
        return randomized.plain_ra(q, k, v, random.uniform, random.noise)
    if cfg.attention == "lara":
        return randomized.plain_lara(q, k, v, random.noise, cfg.lara_weights)
    out = []
    for query in q:
        top, bottom = torch.zeros_like(v[0]), torch.zeros_like(v[0, 0])
        for key, value in zip(k, v):
            if cfg.attention == "softmax":
                weight = torch.exp(query.dot(key) / len(query) ** 0.5)
            else:
                weight = plain_kernel(cfg.feature_map, query, key, random.w)
            top, bottom = top + weight * value, bottom + weight
        floor = cfg.denominator_eps * len(k) if cfg.attention == "rfa" and cfg.feature_map == "gaussian" else 0.0
        bottom = bottom.clamp_min(floor)
        out.append(top / bottom if bottom > 0 else torch.zeros_like(top))
    return torch.stack(out)
