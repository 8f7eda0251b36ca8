"""Optimizers and the learning-rate schedule: AdamW, or Muon for the hidden matrices with AdamW for the rest."""

from __future__ import annotations

import math

import torch

from .config import TrainConfig
from .model import Decoder
from .muon import Muon
from .processes import Processes


def schedule(step: int, cfg: TrainConfig, decay: str = "cosine") -> float:
    """Returns the factor for every learning rate: linear warm-up, then a cosine or linear decay from 1 to
    `min_lr_ratio`."""
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    p = min(1.0, (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup))
    left = 1 - p if decay == "linear" else 0.5 * (1 + math.cos(math.pi * p))
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left


def build(model: Decoder, cfg: TrainConfig, processes: Processes | None = None) -> list[torch.optim.Optimizer]:
    """Builds the optimizers. Weight decay applies only to matrices, not to norms, gate biases, sigma and convolutions."""
    hidden, matrices, rest = [], [], []
    for name, p in model.named_parameters():
        if p.ndim == 2 and ("_proj." in name):
            hidden.append(p)
        elif p.ndim == 2 and not name.endswith("sigma"):
            matrices.append(p)
        else:
            rest.append(p)
    betas = (cfg.beta1, cfg.beta2)
    if cfg.optimizer == "adamw":
        groups = [{"params": hidden + matrices, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        optims = [torch.optim.AdamW(groups, lr=cfg.lr, betas=betas)]
    elif cfg.optimizer == "muon":
        groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        optims = [
            Muon(hidden, lr=cfg.muon_lr, weight_decay=cfg.weight_decay, processes=processes),
            torch.optim.AdamW(groups, lr=cfg.lr, betas=betas),
        ]
    else:
        raise ValueError(f"train.optimizer: expected 'adamw' or 'muon', found {cfg.optimizer!r}")
    for o in optims:
        for g in o.param_groups:
            g["base_lr"] = g["lr"]
    return optims
