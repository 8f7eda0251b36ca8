"""An exponential moving average of a run's weights, kept in f32 beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """An exponential moving average of a model's weights.

    weights: the average of each tensor in the model's state dict, by name
    """

    def __init__(self, model: nn.Module, decay: float):
        """decay: the share of the old average that each step keeps"""
        self.decay = decay
        self.weights: dict[str, Tensor] = {name: x.detach().float().clone() for name, x in model.state_dict().items()}

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Updates the average with the weights after a step. step: the step's number, from 0

        The first steps use a lower decay; otherwise the untrained initial weights would dominate the average.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, x in model.state_dict().items():
            self.weights[name].lerp_(x.float(), 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Replaces the model's weights by the average inside a `with` block and restores them afterwards."""
        own = {name: x.detach().clone() for name, x in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(own)
