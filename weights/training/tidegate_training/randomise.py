"""Random values for every tensor of a tiny model: fixtures and tests need weights that all have an effect."""

from __future__ import annotations

import torch

from .features import draw_matrices
from .model import Decoder


@torch.no_grad()
def randomise(model: Decoder, gen: torch.Generator) -> None:
    """Draws values that make every tensor matter: norms are not all ones, biases not zero, and sigma varies."""
    normal = lambda p, mean, std: p.normal_(mean, std, generator=gen)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.uniform_(0.6, 1.5, generator=gen)
        elif name.endswith("sigma"):
            p.uniform_(0.5, 1.3, generator=gen)
        elif name.endswith("gate.bias"):
            p.uniform_(-1.0, 4.0, generator=gen)
        elif name.endswith("gate.weight"):
            normal(p, 0.0, 2.0 * p.shape[1] ** -0.5)
        elif name.endswith("far_bias"):
            normal(p, 0.0, 1.0)
        elif "conv1d" in name:
            normal(p, 0.3, 0.4)
        elif name.endswith("embed_tokens.weight"):
            normal(p, 0.0, 0.5)
        else:
            normal(p, 0.0, p.shape[-1] ** -0.5)
    # The decoder's random matrices, and those of cross attention if there is one.
    for _, matrices in model.model.named_buffers():
        if model.cfg.feature_map == "favor":
            matrices.copy_(draw_matrices("favor", tuple(matrices.shape), gen))
        else:
            normal(matrices, 0.0, 1.0)
