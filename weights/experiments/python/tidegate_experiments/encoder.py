"""A bidirectional encoder that classifies a sequence: the trainer's encoder blocks with any bidirectional mixer, and a
head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidegate_training.encoder import EncoderBlock
from tidegate_training.features import draw_matrices, numbers
from tidegate_training.layers import RMSNorm, rotary_angles

from .bidirectional import Mixer, MixerConfig


@dataclass(frozen=True)
class EncoderConfig(MixerConfig):
    """An encoder's sizes and its mixer.

    pooling: what the classifier reads, the `mean` of all tokens or the `first` token
    """

    vocab_size: int = 17
    classes: int = 10
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    head_dim: int = 16
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    pooling: str = "mean"

    def __post_init__(self):
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, found {self.head_dim}")
        if self.pooling not in ("mean", "first"):
            raise ValueError(f"pooling: expected 'mean' or 'first', found {self.pooling!r}")


class Encoder(nn.Module):
    """The encoder: maps token ids (batch, time) to the class logits of each sequence (batch, classes)."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(EncoderBlock(cfg, Mixer(cfg, cfg.num_attention_heads, cfg.head_dim)) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.classifier = nn.Linear(cfg.hidden_size, cfg.classes)
        self.init_weights(0)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws normal weights, with residual outputs scaled by depth.

        For one seed, the encoders of all mixers share their common weights and the random matrices of the same distribution
        and size.
        """
        cfg, std = self.cfg, self.cfg.initializer_range
        common, matrices = numbers(seed, "weights"), numbers(seed, "matrices")
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.normal_(std=std / math.sqrt(2 * cfg.num_hidden_layers), generator=common)
            elif name.endswith(("proj.weight", "classifier.weight", "embed_tokens.weight")):
                p.normal_(std=std, generator=common)
        self.classifier.bias.zero_()
        for layer in self.layers:
            fixed = getattr(layer.self_attn.mixer, "random_matrices", None)
            if fixed is not None:
                fixed.copy_(draw_matrices(cfg.feature_map, tuple(fixed.shape), matrices))

    def forward(self, ids: Tensor, mask: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Returns the logits, or with `targets` (batch) the mean loss in nats. mask: bool (batch, time), false for padding;
        None without padding"""
        angles = rotary_angles(torch.arange(ids.shape[1], device=ids.device)[None], self.cfg.head_dim, self.cfg.rope_theta)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, mask, angles)
        x = self.norm(x)
        if self.cfg.pooling == "first":
            pooled = x[:, 0]
        elif mask is None:
            pooled = x.mean(1)
        else:
            real = mask.to(x.dtype).unsqueeze(-1)
            pooled = (x * real).sum(1) / real.sum(1)
        logits = self.classifier(pooled).float()
        return logits if targets is None else F.cross_entropy(logits, targets)
