"""The Muon optimizer (Jordan et al., 2024): momentum, with each matrix replaced by the nearest one with equal singular
values.

PyTorch has the same optimizer, but it multiplies in bf16, which CPUs without AMX may do at half the speed of f32 (an Intel
Xeon: 74 and 130 GFLOP/s on one core), and every process of a run would repeat all of the work. Here each process
orthogonalizes its share of the matrices, and all matrices of one shape at once, because launching small products on a GPU
takes longer than computing them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .processes import Processes

# Coefficients and number of the Newton-Schulz steps, from https://kellerjordan.github.io/posts/muon/. They raise small
# singular values quickly, and leave all of them between about 0.7 and 1.2 rather than at 1.
QUINTIC, STEPS = (3.4445, -4.7750, 2.0315), 5


def orthogonalise(g: Tensor) -> Tensor:
    """Returns approximately U V^T for each matrix g = U S V^T. g: (..., rows, columns) -> same shape and type"""
    a, b, c = QUINTIC
    tall = g.shape[-2] > g.shape[-1]
    x = g.flatten(0, -3) if g.ndim > 2 else g.unsqueeze(0)
    x = x.bfloat16() if g.is_cuda else x.float()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)  # the iteration needs singular values of at most 1
    for _ in range(STEPS):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(g.shape).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum with decoupled weight decay; tall matrices take larger steps."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, momentum: float = 0.95,
                 processes: Processes | None = None):
        """params: matrices; every process has the same matrices and the same gradients"""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.processes = processes or Processes()

    @torch.no_grad()
    def step(self) -> None:
        p = self.processes
        for group in self.param_groups:
            params = [x for x in group["params"] if x.grad is not None]
            updates, mine = [], {}
            for i, x in enumerate(params):
                if not self.state[x]:
                    self.state[x]["momentum_buffer"] = torch.zeros_like(x)
                m = self.state[x]["momentum_buffer"]
                m.lerp_(x.grad, 1 - group["momentum"])
                own = i % p.size == p.rank
                updates.append(x.grad.lerp(m, group["momentum"]) if own else torch.zeros_like(x))
                if own:
                    mine.setdefault(x.shape, []).append(i)
            for members in mine.values():
                together = orthogonalise(torch.stack([updates[i] for i in members]))
                for i, update in zip(members, together):
                    updates[i] = update
            p.add(updates)  # only one process has a nonzero value of each update
            for x, update in zip(params, updates):
                x.mul_(1 - group["lr"] * group["weight_decay"])
                x.sub_(update, alpha=group["lr"] * math.sqrt(max(1.0, x.shape[0] / x.shape[1])))
