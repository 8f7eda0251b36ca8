"""The average of a run's weights: an exponential moving average in f32, beside the weights that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """weights: name and average of each tensor of the model, its shape as in the model"""

    def __init__(self, model: nn.Module, decay: float):
        """decay: of the older weights, per step"""
        self.decay = decay
        self.weights: dict[str, Tensor] = {name: x.detach().float().clone() for name, x in model.state_dict().items()}

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Takes in the weights after a step. step: its number, from 0. The first steps forget faster, or the average would
        be of the weights that nothing had trained."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, x in model.state_dict().items():
            self.weights[name].lerp_(x.float(), 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model has the average's weights inside, and its own again after."""
        own = {name: x.detach().clone() for name, x in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(own)
