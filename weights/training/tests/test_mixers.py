"""Every causal mixer's fast form against its step-by-step reference in f64: values, gradients, segments and document
starts."""

import dataclasses

import pytest
import torch

from tidegate_training import features, naive, rfa, softmax
from tidegate_training.config import ModelConfig
from tidegate_training.model import MIXERS

BASE = ModelConfig(vocab_size=11, hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=6,
                   proj_dim=7, output_norm=False, denominator_eps=0.05)
WINDOW = 5
KINDS = {
    "gaussian": {}, "gaussian-no-gate": {"gate": False},
    "arc-cosine": {"feature_map": "arc_cosine"}, "arc-cosine-no-gate": {"feature_map": "arc_cosine", "gate": False},
    "elu": {"feature_map": "elu"}, "elu-no-gate": {"feature_map": "elu", "gate": False},
    "favor": {"feature_map": "favor"}, "favor-no-gate": {"feature_map": "favor", "gate": False},
    "softmax": {"attention": "softmax", "sliding_window": WINDOW, "position_embedding": "none"},
    "hybrid": {"attention": "hybrid", "sliding_window": WINDOW, "position_embedding": "none"},
    "hybrid-no-gate": {"attention": "hybrid", "sliding_window": WINDOW, "position_embedding": "none", "gate": False},
}


def mixer(kind: str):
    """Returns a mixer in f64 whose own tensors all have an effect."""
    torch.manual_seed(3)
    made = MIXERS[dataclasses.replace(BASE, **KINDS[kind]).attention](dataclasses.replace(BASE, **KINDS[kind])).double()
    with torch.no_grad():
        if made.sigma is not None:
            made.sigma.uniform_(0.5, 1.3)
        if hasattr(made, "far_bias"):
            made.far_bias.uniform_(-1.0, 1.0)
    return made


def inputs(t: int, gate: bool, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    x = {"q": 2 * rand(2, 2, t, 6), "k": 2 * rand(2, 2, t, 6), "v": rand(2, 2, t, 6)}
    if gate:
        x["a"] = 2 * rand(2, 2, t)
    return {name: y.requires_grad_() for name, y in x.items()}


def truth_of_document(m, q, k, v, a):
    """Reads one document of one row from an empty past -> h, and the sums that it leaves (none for softmax)."""
    cfg = m.cfg
    zeros = lambda *shape: q.new_zeros(*q.shape[:2], *shape)
    sums = (zeros(cfg.features, 7), zeros())
    if cfg.attention == "softmax":
        return naive.softmax(q, k, v, WINDOW), ()
    if cfg.feature_map == "favor":
        return naive.favor(q, k, v, a, (*sums, zeros()), m.random_matrices)
    maps = {"gaussian": features.gaussian_features, "arc_cosine": features.arc_cosine_features}
    if cfg.feature_map == "elu":
        phi = features.elu_features
    else:
        phi = lambda x: maps[cfg.feature_map](features.unit(x), m.random_matrices * m.sigma[:, None])
    eps = cfg.denominator_eps if cfg.feature_map == "gaussian" else 0.0
    if cfg.attention == "hybrid":
        return naive.hybrid(q, k, v, a, (phi(q), phi(k)), m.far_bias, eps, WINDOW)
    return naive.recurrent(phi(q), phi(k), v, a, sums, eps)


def truth(m, x, starts):
    """Runs the reference row by row, document by document."""
    outs, states = [], []
    t = x["v"].shape[2]
    for row in range(2):
        cuts = sorted({0, t} | set(starts[row].nonzero().flatten().tolist()))
        pieces = []
        for i, j in zip(cuts, cuts[1:]):
            cut = {name: y[row : row + 1, :, i:j] for name, y in x.items()}
            out, state = truth_of_document(m, cut["q"], cut["k"], cut["v"], cut.get("a"))
            pieces.append(out)
        outs.append(torch.cat(pieces, dim=2))
        states.append(state)
    return torch.cat(outs), tuple(torch.cat(parts) for parts in zip(*states))


def fast(m, x, starts, edges, chunk):
    """Runs the fast form segment by segment, from `edges[0] = 0` to `edges[-1]`, with the state carried."""
    state = m.empty(2, "cpu")
    state = m.State(*(y.double() if y is not None and y.is_floating_point() else y for y in state.tuple()))
    outs = []
    for i, j in zip(edges, edges[1:]):
        cut = [y[:, :, i:j] for y in (x["q"], x["k"], x["v"])]
        st = starts[:, i:j] if starts.any() else None
        doc = None if st is None else st.long().cumsum(1)
        out, state = m.mix(*cut, x["a"][:, :, i:j] if "a" in x else None, state, st, doc, chunk)
        outs.append(out)
    return torch.cat(outs, dim=2), state


def some_starts(which: str, t: int):
    starts = torch.zeros(2, t, dtype=torch.bool)
    if which == "documents":
        starts[0, [0, 3, 4, 17, 30]] = True
        starts[1, [11, 29]] = True
    return starts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["one text", "documents"])
@pytest.mark.parametrize(("edges", "chunk"), [([0, 40], 64), ([0, 40], 8), ([0, 1, 2, 13, 14, 18, 33, 40], 4),
                                              ([0, *range(1, 41)], 1)])
def test_the_fast_form_agrees_with_the_reference(kind, which, edges, chunk):
    m, starts = mixer(kind), some_starts(which, 40)
    x = inputs(40, m.gate is not None)
    with torch.no_grad():
        got, state = fast(m, x, starts, edges, chunk)
        want, sums = truth(m, x, starts)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    for name, y in zip(("s", "c", "m"), sums):
        torch.testing.assert_close(getattr(state, name), y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["one text", "documents"])
def test_gradients_agree(kind, which):
    found = []
    for form in (lambda m, x, st: fast(m, x, st, [0, 9, 40], 8)[0], lambda m, x, st: truth(m, x, st)[0]):
        m, starts = mixer(kind), some_starts(which, 40)
        x = inputs(40, m.gate is not None)
        (form(m, x, starts) * torch.arange(40)[:, None]).square().sum().backward()
        own = {"sigma": m.sigma, "far_bias": getattr(m, "far_bias", None)}
        found.append({n: p.grad for n, p in (x | own).items() if p is not None})
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-7, atol=1e-8, msg=lambda text: f"{name}: {text}")
        assert want.abs().max() > 0, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [8, 64])
@torch.no_grad()
def test_no_state_equals_an_empty_state(kind, chunk):
    m, starts = mixer(kind), some_starts("documents", 40)
    x = inputs(40, m.gate is not None)
    for st in (starts, torch.zeros_like(starts)):
        want, _ = fast(m, x, st, [0, 40], chunk)
        given = (st, st.long().cumsum(1)) if st.any() else (None, None)
        got, after = m.mix(x["q"], x["k"], x["v"], x.get("a"), None, *given, chunk)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        assert after is None


@torch.no_grad()
def test_favor_survives_keys_that_overflow_without_a_maximum():
    """The projections reach 100 and more, so their exponentials are infinite in f32."""
    gen = torch.Generator().manual_seed(5)
    rand = lambda *shape: torch.randn(*shape, generator=gen)
    w = features.orthogonal_matrices(1, 16, 8, gen)
    q, k, v = 30 * rand(1, 1, 50, 8), 30 * rand(1, 1, 50, 8), rand(1, 1, 50, 8)
    assert features.favor_exponents(k, w)[0].max() > 100
    out, (s, c, m) = favor(q, k, v, None, w, 16)
    assert out.isfinite().all() and s.isfinite().all() and m.isfinite().all()


def favor(q, k, v, a, w, chunk, dtype=torch.float32):
    """Runs the chunked form from an empty state."""
    q, k, v, w = (x.to(dtype) for x in (q, k, v, w))
    b, h, _, d = q.shape
    state = (q.new_zeros(b, h, w.shape[1], d + 1), q.new_zeros(b, h), q.new_zeros(b, h))
    phi_k, maxima = features.favor_relative(k, w)
    return rfa.chunked(features.favor_features(q, w), phi_k, v, None if a is None else a.to(dtype), state, 0.0, chunk, None,
                       maxima)


@pytest.mark.parametrize("lengths", [[40.0], [8.0, 110.0, 8.0], [110.0, 8.0], [250.0, 8.0]])
@pytest.mark.parametrize("gate", [False, True])
@torch.no_grad()
def test_long_keys_do_not_kill_a_head(lengths, gate):
    """f32 gives what f64 gives if all keys are long, or one is very long and comes before or among ordinary ones."""
    gen = torch.Generator().manual_seed(7)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    w = features.orthogonal_matrices(2, 128, 64, gen).double()
    q, k, v = 0.5 * rand(1, 2, 90, 64), rand(1, 2, 90, 64), rand(1, 2, 90, 64)
    a = rand(1, 2, 90) if gate else None
    length = torch.tensor(lengths + lengths[-1:] * (90 - len(lengths)), dtype=torch.float64)
    k *= (length[:, None] / k.norm(dim=-1, keepdim=True))
    # The reference in f64 uses no maximum at all, only products of kernels; there the features of the longest key are 0.
    none = torch.zeros(1, dtype=torch.float64)
    phi_q, phi_k = features.favor_features(q, w), features.favor_features(k, w, none)
    want, _ = naive.recurrent(phi_q, phi_k, v, a, (q.new_zeros(1, 2, 128, 65), q.new_zeros(1, 2)), 0.0)
    first = 1 if lengths[0] > 200 else 0
    want[:, :, :first] = v[:, :, :first]
    zeros = (torch.zeros(1, 2, 128, 65), torch.zeros(1, 2), torch.zeros(1, 2))
    single = [x if x is None else x.float() for x in (q, k, v, a)]
    forms = [naive.favor(*single, zeros, w.float())[0], *(favor(q, k, v, a, w, chunk)[0] for chunk in (1, 9, 64))]
    for out in forms:
        torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("form", ["naive", 1, 9, 64])
def test_long_queries_and_keys_have_the_gradients_of_the_kernel(form, gate):
    """Norms are 10 to 40; the reference is in f64, with products of kernels and without any maximum."""
    gen = torch.Generator().manual_seed(11)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    w = features.orthogonal_matrices(2, 24, 8, gen).double()
    length = lambda: 10 + 30 * torch.rand(1, 2, 40, 1, generator=gen, dtype=torch.float64)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    x = {"q": length() * unit(rand(1, 2, 40, 8)), "k": length() * unit(rand(1, 2, 40, 8)), "v": rand(1, 2, 40, 8)}
    if gate:
        x["a"] = rand(1, 2, 40)
    for y in x.values():
        y.requires_grad_()
    empty = lambda *more: (w.new_zeros(1, 2, 24, 9), w.new_zeros(1, 2), *more)
    phi = lambda y: features.favor_features(y, w, torch.zeros(1, dtype=torch.float64))
    want = naive.recurrent(phi(x["q"]), phi(x["k"]), x["v"], x.get("a"), empty(), 0.0)[0]
    if form == "naive":
        got = naive.favor(x["q"], x["k"], x["v"], x.get("a"), empty(w.new_zeros(1, 2)), w)[0]
    else:
        got = favor(x["q"], x["k"], x["v"], x.get("a"), w, form, torch.float64)[0]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    weight = rand(1, 2, 40, 8)
    grads = [torch.autograd.grad((out * weight).sum(), list(x.values())) for out in (got, want)]
    for name, g, truth_of in zip(x, *grads):
        torch.testing.assert_close(g, truth_of, rtol=1e-7, atol=1e-9, msg=lambda text: f"{name}: {text}")
        assert truth_of.abs().max() > 1e-3, name


@torch.no_grad()
def test_a_key_does_not_change_what_was_read_before_it():
    """A key whose features are far above all others is in the same chunk as the queries before it."""
    gen = torch.Generator().manual_seed(12)
    rand = lambda *shape: torch.randn(*shape, generator=gen)
    w = features.orthogonal_matrices(1, 32, 16, gen)
    q, k, v = rand(1, 1, 30, 16), 12 * rand(1, 1, 30, 16), rand(1, 1, 30, 16)
    k[:, :, 20] = 0.0  # log feature 0; a long key's is far below -100
    assert features.favor_relative(k, w)[1][0, 0, :20].max() < -100
    a, b = (favor(q[:, :, :n], k[:, :, :n], v[:, :, :n], None, w, 64)[0] for n in (20, 30))
    torch.testing.assert_close(b[:, :, :20], a)
    assert a.abs().max() > 0.1


@pytest.mark.parametrize("stored", [0.0, 50.0, -90.0])
@torch.no_grad()
def test_the_maximum_of_an_empty_state_has_no_effect(stored):
    m, x = mixer("favor"), inputs(20, gate=True)
    none = torch.zeros(2, 20, dtype=torch.bool)
    want, after = fast(m, x, none, [0, 20], 8)
    state = m.empty(2, "cpu")
    state = rfa.RfaState(state.s.double(), state.c.double(), m=torch.full_like(state.c.double(), stored))
    got, state = m.mix(x["q"], x["k"], x["v"], x["a"], state, None, None, 8)
    assert torch.equal(got, want) and torch.equal(state.m, after.m)


@pytest.mark.parametrize("gate", [False, True])
@torch.no_grad()
def test_the_scale_of_sigma_does_not_change_the_arc_cosine(gate):
    """c does not depend on sigma but the kernel does, so a floor on denominators in units of c would change the result."""
    m = mixer("arc-cosine" if gate else "arc-cosine-no-gate")
    x, none = inputs(40, gate), torch.zeros(2, 40, dtype=torch.bool)
    forms = lambda: [truth(m, x, none)[0], *(fast(m, x, none, [0, 40], chunk)[0] for chunk in (1, 8))]
    before = forms()
    m.sigma.mul_(0.1)
    for after, before in zip(forms(), before):
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_a_denominator_of_0_gives_0_in_all_forms():
    """Keys whose projections are all negative have no arc-cosine features; closed gates let nothing in."""
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.rand(1, 1, 9, 4, generator=gen, dtype=torch.float64) for _ in range(3))
    w = torch.rand(1, 3, 4, generator=gen, dtype=torch.float64)
    phi = lambda x: features.arc_cosine_features(features.unit(x), w)
    empty = lambda *more: (q.new_zeros(1, 1, 3, 5), q.new_zeros(1, 1), *more)
    shut = torch.full((1, 1, 9), 1000.0, dtype=torch.float64)
    outs = [naive.recurrent(phi(q), phi(-k), v, None, empty(), 0.0)[0], naive.favor(q, k, v, shut, empty(q.new_zeros(1, 1)), w)[0],
            *(rfa.chunked(phi(q), phi(-k), v, None, empty(), 0.0, chunk)[0] for chunk in (1, 4)),
            favor(q, k, v, shut, w, 4, torch.float64)[0]]
    assert all((out == 0).all() for out in outs)


def test_the_plain_form_divides_as_documented():
    num = torch.tensor([[[2.0, 4.0], [2.0, 4.0], [0.0, 0.0]]], requires_grad=True)
    den, floor = torch.tensor([[0.5, -3.0, 0.0]]), torch.tensor([[0.1, 0.1, 0.0]])
    out = naive.divided(num, den, floor)
    torch.testing.assert_close(out.detach(), torch.tensor([[[4.0, 8.0], [20.0, 40.0], [0.0, 0.0]]]))
    out.sum().backward()
    torch.testing.assert_close(num.grad, torch.tensor([[[2.0, 2.0], [10.0, 10.0], [0.0, 0.0]]]))


@torch.no_grad()
def test_softmax_with_a_wide_window_attends_to_all_tokens():
    x = inputs(30, gate=False)
    doc = softmax.documents(None, None, 64, 2, 30, "cpu")
    got = softmax.attend(x["q"], *(softmax.with_past(x[n], None, 64) for n in "kv"), doc, 64, past=True)
    want = torch.nn.functional.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_hybrid_counts_each_token_once():
    """With a far weight of zero only the window is left; with values of one, any weights average to one."""
    m = mixer("hybrid")
    x = inputs(40, gate=True)
    none = torch.zeros(2, 40, dtype=torch.bool)
    m.far_bias.fill_(-1e4)
    torch.testing.assert_close(fast(m, x, none, [0, 40], 16)[0], naive.softmax(x["q"], x["k"], x["v"], WINDOW))
    _, state = fast(m, x, none, [0, 40], 16)
    assert state.k.shape[2] == WINDOW and (state.filled == WINDOW).all()
    torch.testing.assert_close(state.k, x["k"].detach()[:, :, -WINDOW:])
    no_gate = mixer("hybrid-no-gate")
    _, state = fast(no_gate, inputs(40, gate=False), none, [0, 7, 40], 16)
    assert (state.c == 40 - WINDOW).all()
