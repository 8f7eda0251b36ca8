"""Each bidirectional attention against its plain form, with padding; its cost; and the encoder around it."""

import dataclasses

import pytest
import torch

from tidegate_experiments import bidirectional as bi
from tidegate_experiments.encoder import Encoder, EncoderConfig
from tidegate_training.features import draw_matrices

CASES = [bi.MixerConfig("softmax")]
CASES += [bi.MixerConfig("rfa", m, proj_dim=6, denominator_eps=0.05) for m in bi.FEATURE_MAPS]
CASES += [bi.MixerConfig("ra", samples=2)]
CASES += [bi.MixerConfig("lara", landmarks=3, lara_weights=w) for w in ("query-specific", "balance")]
name = lambda c: {"rfa": c.feature_map, "lara": c.lara_weights}.get(c.attention, c.attention)

B, H, D = 2, 2, 4


def inputs(cfg: bi.MixerConfig, queries: int, keys: int, dtype=torch.float64):
    """Returns leaves q, k, v and the random numbers of `cfg`."""
    gen = torch.Generator().manual_seed(queries * 100 + keys)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)
    x = {"q": rand(B, H, queries, D), "k": rand(B, H, keys, D), "v": rand(B, H, keys, D)}
    random = bi.Random()
    if cfg.attention == "rfa" and cfg.feature_map != "elu":
        x["w"] = draw_matrices(cfg.feature_map, (H, cfg.proj_dim, D), gen).to(dtype)
    for t in x.values():
        t.requires_grad_()
    if "w" in x:
        random = bi.Random(w=x["w"])
    if cfg.attention == "ra":
        random = bi.Random(uniform=torch.rand(cfg.samples, B, H, queries, generator=gen, dtype=torch.float64).to(dtype),
                           noise=rand(cfg.samples, B, H, queries, D))
    if cfg.attention == "lara":
        random = bi.Random(noise=rand(B, H, 1, cfg.landmarks, D))
    return x, random


def masks(queries: int, keys: int, same: bool):
    """Returns masks with padding in row 1 only: one mask for self attention, two for cross attention."""
    query, key = torch.ones(B, queries, dtype=torch.bool), torch.ones(B, keys, dtype=torch.bool)
    query[1, -3:] = False
    key[1, -3:] = False
    if not same:
        key[1, 1] = False
    return query, key


def plain(cfg: bi.MixerConfig, x: dict, random: bi.Random, query, key):
    """Runs `plain_attend` for each row and head, without the padding: (all real queries of all rows and heads, d)."""
    out = []
    for i in range(B):
        for j in range(H):
            own = bi.Random()
            if random.w is not None:
                own = bi.Random(w=random.w[j])
            if cfg.attention == "ra":
                own = bi.Random(uniform=random.uniform[:, i, j][:, query[i]], noise=random.noise[:, i, j][:, query[i]])
            if cfg.attention == "lara":
                own = bi.Random(noise=random.noise[i, j])
            out.append(bi.plain_attend(cfg, x["q"][i, j][query[i]], x["k"][i, j][key[i]], x["v"][i, j][key[i]], own))
    return torch.cat(out)


@pytest.mark.parametrize("queries, keys", [(8, 8), (5, 9)], ids=["self", "cross"])
@pytest.mark.parametrize("cfg", CASES, ids=name)
def test_attend_agrees_with_the_plain_form(cfg, queries, keys):
    x, random = inputs(cfg, queries, keys)
    query, key = masks(queries, keys, queries == keys)
    whole = torch.ones_like(query), torch.ones_like(key)
    for given, used in (((query, key), (query, key)), ((None, None), whole)):
        out, grads = [], []
        for form in ("fast", "plain"):
            for t in x.values():
                t.grad = None
            if form == "fast":
                y = bi.attend(cfg, x["q"], x["k"], x["v"], random, given[1], given[0])
                y = torch.cat([y[i, j][used[0][i]] for i in range(B) for j in range(H)])
            else:
                y = plain(cfg, x, random, *used)
            (y * torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape).sin()).sum().backward()
            out.append(y.detach())
            grads.append({n: t.grad for n, t in x.items()})
        torch.testing.assert_close(out[0], out[1], rtol=1e-9, atol=1e-10)
        for n in x:
            torch.testing.assert_close(grads[0][n], grads[1][n], rtol=1e-8, atol=1e-10, msg=lambda m: f"{n}: {m}")
            assert grads[1][n].abs().max() > 1e-3, n


@pytest.mark.parametrize("cfg", CASES, ids=name)
def test_padding_has_no_effect(cfg):
    x, random = inputs(cfg, 8, 8, torch.float32)
    query, key = masks(8, 8, True)
    real = lambda y: y.transpose(1, 2)[query]
    before = real(bi.attend(cfg, x["q"], x["k"], x["v"], random, key, query))
    with torch.no_grad():
        for n in "qkv":
            x[n].transpose(1, 2)[~key] = 300.0
    y = bi.attend(cfg, x["q"], x["k"], x["v"], random, key, query)
    torch.testing.assert_close(real(y), before)
    assert y.isfinite().all()
    real(y).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in x.values())
    assert all((x[n].grad.transpose(1, 2)[~key] == 0).all() for n in "kv")


def saved_numbers(cfg: bi.MixerConfig, tokens: int) -> int:
    """Returns how many numbers are kept for the backward pass of one sequence."""
    mixer = bi.Mixer(cfg, 1, 4)
    q, k, v = (torch.randn(1, 1, tokens, 4, requires_grad=True) for _ in range(3))
    seen = {}  # keeps the tensors alive, so that no memory is reused

    def pack(t):
        seen.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = mixer(q, k, v, torch.ones(1, tokens, dtype=torch.bool), torch.ones(1, tokens, dtype=torch.bool))
    assert out.shape == q.shape
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in seen.values())


@pytest.mark.parametrize("cfg", [c for c in CASES if c.attention in ("rfa", "lara")], ids=name)
def test_memory_is_linear_in_the_tokens(cfg):
    small, large = saved_numbers(cfg, 512), saved_numbers(cfg, 4096)
    assert large < 8.5 * small and large < 512 * 4096, (small, large)


def test_an_invalid_configuration_is_refused():
    wrong = {"attention": "hybrid", "feature_map": "relu", "lara_weights": "equal", "landmarks": 0, "proj_dim": 0}
    for key, value in wrong.items():
        with pytest.raises(ValueError, match=key):
            bi.MixerConfig(**{key: value})


SMALL = EncoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
                      initializer_range=0.2)


def encoder(cfg: bi.MixerConfig) -> Encoder:
    torch.manual_seed(3)
    return Encoder(dataclasses.replace(SMALL, **dataclasses.asdict(cfg)))


@pytest.mark.parametrize("cfg", CASES, ids=name)
def test_padding_does_not_change_a_class(cfg):
    model = encoder(cfg).eval()
    ids = torch.randint(1, 16, (2, 30), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 21:] = False
    got = model(ids.masked_fill(~mask, 0), mask)
    if cfg.attention != "ra":  # ra draws a sample per query, so another length changes them
        torch.testing.assert_close(got[1:], model(ids[1:, :21]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[:1], model(ids[:1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, model(ids.masked_fill(~mask, 7), mask), rtol=1e-5, atol=1e-6)
    # The order matters, because the tokens have positions.
    assert (model(ids.flip(1)) - model(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("weights", ["query-specific", "balance"])
@torch.no_grad()
def test_lara_draws_new_noise_only_in_training(weights):
    mixer = bi.Mixer(bi.MixerConfig("lara", landmarks=3, lara_weights=weights), H, D)
    q, k, v = (torch.randn(B, H, 9, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    one, two = mixer.train()(q, k, v), mixer(q, k, v)
    assert (one - two).abs().max() > 1e-3
    one, two = mixer.eval()(q, k, v), mixer(q, k, v)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, bi.attend(mixer.cfg, q, k, v, bi.Random(noise=torch.zeros(B, H, 1, 3, D))))


@pytest.mark.parametrize("cfg", CASES, ids=name)
def test_every_parameter_has_a_gradient(cfg):
    model = encoder(cfg)
    ids = torch.randint(1, 16, (3, 40), generator=torch.Generator().manual_seed(5))
    model(ids, torch.arange(40)[None] < torch.tensor([[40], [33], [12]]), torch.tensor([1, 4, 9])).backward()
    for n, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, n


@torch.no_grad()
def test_long_keys_do_not_make_favor_blind():
    """f32 gives what f64 gives without a maximum, if all real keys are long and there is padding beside them."""
    gen = torch.Generator().manual_seed(9)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    cfg = bi.MixerConfig("rfa", "favor", proj_dim=128)
    w = draw_matrices("favor", (1, 128, 64), gen).double()
    q, k, v = 0.5 * rand(1, 1, 5, 64), rand(1, 1, 12, 64), rand(1, 1, 12, 64)
    k *= 45 / k.norm(dim=-1, keepdim=True)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 9:] = False
    want = bi.plain_attend(cfg, q[0, 0], k[0, 0, :9], v[0, 0, :9], bi.Random(w=w[0]))
    got = bi.attend(cfg, q.float(), k.float(), v.float(), bi.Random(w=w.float()), mask)
    assert want.abs().mean() > 0.1
    torch.testing.assert_close(got[0, 0].double(), want, rtol=1e-3, atol=1e-3)
