"""Tests of the decoder: carried states, document boundaries, gradients."""

import pytest
import torch
from common import decoder

KINDS = {
    "all": {},
    "plain": {"output_norm": False, "conv_kernel": 0},
    "no gate": {"gate": False},
    "rope": {"position_embedding": "rope"},
    "untied": {"tie_word_embeddings": False},
    "arc-cosine": {"feature_map": "arc_cosine"},
    "elu": {"feature_map": "elu"},
    "favor": {"feature_map": "favor"},
    "favor, no gate": {"feature_map": "favor", "gate": False},
    "softmax": {"attention": "softmax", "sliding_window": 20},
    "hybrid": {"attention": "hybrid", "sliding_window": 12},
    "hybrid, no gate": {"attention": "hybrid", "sliding_window": 12, "gate": False},
}


def ids(t: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 300, (rows, t), generator=torch.Generator().manual_seed(seed))


def same(got, want):
    assert (got is None) == (want is None)
    if want is not None:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def same_state(got, want):
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a.tuple(), b.tuple(), strict=True):
            same(x, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 33, 64, 99])
@torch.no_grad()
def test_a_text_in_two_segments_equals_one_in_one(kind, cut):
    model, x = decoder(**KINDS[kind]), ids(100)
    want, end = model(x, model.new_state(2))
    positions = torch.arange(100).expand_as(x)
    a, state = model(x[:, :cut], model.new_state(2), None, positions[:, :cut])
    b, state = model(x[:, cut:], state, None, positions[:, cut:])
    same(torch.cat([a, b], dim=1), want)
    same_state(state, end)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("rope", "untied")])
@pytest.mark.parametrize("cuts", [[0, 40], [3, 4, 5, 6, 64, 69]])
@torch.no_grad()
def test_documents_in_one_stream_equal_separate_runs(kind, cuts):
    model, x = decoder(**KINDS[kind]), ids(70, rows=1)
    starts = torch.zeros(1, 70, dtype=torch.bool)
    starts[0, cuts] = True
    # The text before the first start continues a state, which must not reach what follows.
    _, before = model(ids(20, rows=1, seed=9), model.new_state(1))
    at = torch.arange(70)
    at = torch.where(at < cuts[0], at + 20, at - torch.tensor([max([c for c in cuts if c <= i], default=0) for i in range(70)]))
    got, end = model(x, before, starts, at[None])
    edges = sorted({0, *cuts, 70})
    for i, j in zip(edges, edges[1:]):
        want, state = model(x[:, i:j], model.new_state(1) if starts[0, i] else before, None, at[None, i:j])
        same(got[:, i:j], want)
    same_state(end, state)


@pytest.mark.parametrize("starts_at", [None, 5])
@torch.no_grad()
def test_the_convolution_is_causal_and_stops_at_documents(starts_at):
    conv = decoder().model.layers[0].self_attn.q_conv1d
    x = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(2))
    doc = None if starts_at is None else (torch.arange(12) >= starts_at).long()[None]
    tail = torch.zeros(1, 3, 16)
    want, _ = conv(x, tail, doc)
    changed = x.clone()
    changed[0, 4] += 1.0
    got, _ = conv(changed, tail, doc)
    moved = (got - want).abs().amax(-1)[0] > 0
    assert moved.nonzero().flatten().tolist() == ([4, 5, 6, 7] if starts_at is None else [4])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_token_by_token_equals_forward(kind):
    model, x = decoder(**KINDS[kind]), ids(30)
    want, _ = model(x, model.new_state(2))
    state, rows = model.new_state(2), []
    for t in range(30):
        y, state = model(x[:, t : t + 1], state, None, torch.full((2, 1), t), chunk=1)
        rows.append(y)
    same(torch.cat(rows, dim=1), want)


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainable_tensor_gets_a_gradient(kind):
    model, x = decoder(**KINDS[kind]), ids(50)
    starts = x % 17 == 0
    loss, _ = model(x[:, :-1], model.new_state(2), starts[:, :-1], targets=x[:, 1:])
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not without
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_fresh_weights_learn_from_the_first_step():
    model = decoder()
    model.init_weights(8.0, 64.0)
    x = ids(50)
    loss, _ = model(x[:, :-1], model.new_state(2), targets=x[:, 1:])
    loss.backward()
    assert not [n for n, p in model.named_parameters() if not p.grad.abs().max() > 0]
    lives = torch.log(torch.tensor(0.5)) / torch.nn.functional.logsigmoid(model.model.layers[0].self_attn.gate.bias)
    torch.testing.assert_close(lives.detach(), torch.tensor([8.0, 64.0]), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_state_does_not_grow(kind):
    model = decoder(**KINDS[kind])
    # The count of tokens in a window and absent parts are not values that a text leaves.
    size = lambda state: sum(x.numel() for s in state for x in s.tuple() if x is not None and x.is_floating_point())
    for length in (10, 500):
        _, state = model(ids(length, rows=1), model.new_state(1))
        assert size(state) == model.cfg.state_numbers


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_without_a_state_are_independent_texts(kind):
    model, x = decoder(**KINDS[kind]), ids(40)
    want, _ = model(x, model.new_state(2))
    got, after = model(x, None)
    same(got, want)
    assert after is None
