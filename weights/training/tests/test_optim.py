"""Muon against PyTorch's, on many matrices at once, and with its work shared between processes."""

import pytest
import torch

from tidegate_training.muon import Muon, orthogonalise

SHAPES = [(32, 32), (24, 64), (64, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_raised_to_about_one(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(g))
    assert 0.6 < values.min() and values.max() < 1.3
    assert torch.equal(orthogonalise(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_of_matrices_is_orthogonalised_like_each_alone(shape):
    g = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(4)) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    together = orthogonalise(g)
    assert together.shape == g.shape and together.dtype == g.dtype
    for one, x in zip(together.flatten(0, 1), g.flatten(0, 1)):
        torch.testing.assert_close(one, orthogonalise(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_pytorch_but_for_its_bf16(shape):
    gen = torch.Generator().manual_seed(2)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    pairs = [(ours, Muon([ours], lr=0.02, weight_decay=0.1)),
             (theirs, torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="original"))]
    for _ in range(4):
        grad = torch.randn(shape, generator=gen)
        for p, optimizer in pairs:
            p.grad = grad.clone()
            optimizer.step()
    moved = theirs.detach() - 1
    assert (ours.detach() - 1 - moved).norm() < 0.01 * moved.norm()


class Share:
    """A stand-in for one of two processes, with what the other process computed."""

    size = 2

    def __init__(self, rank, other):
        self.rank, self.other = rank, other

    def add(self, updates):
        for mine, theirs in zip(updates, self.other):
            assert not (mine.any() and theirs.any()), "both processes computed this matrix"
            mine.add_(theirs)


def test_the_matrices_are_shared_between_processes():
    gen = torch.Generator().manual_seed(3)
    start = [torch.randn(16, 16, generator=gen) for _ in range(3)]
    grads = [torch.randn(16, 16, generator=gen) for _ in range(3)]

    def step(processes=None):
        params = [torch.nn.Parameter(x.clone()) for x in start]
        for p, g in zip(params, grads):
            p.grad = g.clone()
        Muon(params, lr=0.02, weight_decay=0.1, processes=processes).step()
        return params

    alone = step()
    nothing = [torch.zeros(16, 16)] * 3
    of_other = [(s * (1 - 0.02 * 0.1) - x.detach()) / 0.02 for s, x in zip(start, step(Share(1, nothing)))]
    for x, y in zip(step(Share(0, of_other)), alone):
        torch.testing.assert_close(x, y)
