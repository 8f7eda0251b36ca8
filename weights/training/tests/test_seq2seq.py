"""Tests of the encoder-decoder: its forms agree, padding changes nothing, impossible settings are refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tidegate_training import export, seq2seq_fixture
from tidegate_training.randomise import randomise
from tidegate_training.seq2seq import IGNORED, CrossAttention, Seq2Seq, Seq2SeqConfig

RFA, SOFTMAX = seq2seq_fixture.RFA, seq2seq_fixture.SOFTMAX
EACH = pytest.mark.parametrize("cfg", seq2seq_fixture.CASES.values(), ids=seq2seq_fixture.CASES)


def model(cfg: Seq2SeqConfig, seed: int = 0, **changes) -> Seq2Seq:
    """Returns a random model in which every tensor has an effect."""
    made = Seq2Seq(dataclasses.replace(cfg, **changes)).eval()
    randomise(made, torch.Generator().manual_seed(seed))
    return made


def ids(rows: int, time: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, RFA.vocab_size, (rows, time), generator=torch.Generator().manual_seed(seed))


@EACH
@torch.no_grad()
def test_step_by_step_equals_teacher_forcing(cfg):
    m, source, target = model(cfg), ids(3, 9), ids(3, 12, seed=2)
    mask = torch.arange(9) < torch.tensor([[9], [5], [1]])
    whole = m(source, mask, target)
    assert whole.std() > 0.3
    for piece in (1, 5):
        state, found = m.begin(source, mask), []
        for at in range(0, 12, piece):
            logits, state = m.decode(target[:, at : at + piece], state)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-4, atol=1e-5)


def plain_kernel(feature_map: str, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    """Returns the similarity of two vectors (d). w: (proj_dim, d), None for elu"""
    if feature_map == "elu":
        return ((F.elu(q) + 1) * (F.elu(k) + 1)).sum()
    q, k = (x / (x.norm() + 1e-3) for x in (q, k))
    return torch.cos(w @ (q - k)).mean() if feature_map == "gaussian" else (F.relu(w @ q) * F.relu(w @ k)).mean()


@torch.no_grad()
def test_gaussian_features_estimate_the_exact_kernel():
    torch.manual_seed(3)
    x, memory = torch.randn(2, 4, RFA.hidden_size), torch.randn(2, 6, RFA.hidden_size)
    attn = CrossAttention(dataclasses.replace(RFA, proj_dim=4096))
    estimate = torch.zeros_like(x)
    for _ in range(10):
        attn.random_matrices.copy_(torch.randn_like(attn.random_matrices))
        estimate += attn(x, attn.read(memory, None)) / 10
    attn.exact = True
    torch.testing.assert_close(attn(x, attn.read(memory, None)), estimate, rtol=0.0, atol=0.01)
    other = CrossAttention(seq2seq_fixture.ARC_COSINE)
    other.exact = True
    with pytest.raises(ValueError, match="arc_cosine features do not estimate the Gaussian kernel"):
        other.read(memory, None)


@pytest.mark.parametrize(("cfg", "exact"), [*((cfg, False) for cfg in seq2seq_fixture.CASES.values()), (RFA, True)],
                         ids=[*seq2seq_fixture.CASES, "exact"])
def test_cross_attention_agrees_with_a_plain_loop(cfg, exact):
    """Values and gradients, in f64; denominators are plain sums, with a floor for gaussian features."""
    h, d, m, t = cfg.num_attention_heads, cfg.head_dim, 6, 4
    torch.manual_seed(3)
    # A floor that clamps some gaussian denominators, and would clamp all others if it applied to them.
    attn = CrossAttention(dataclasses.replace(cfg, denominator_eps=0.3 if cfg is RFA else 100.0)).double()
    attn.exact, has_floor = exact, cfg is RFA and not exact
    if attn.sigma is not None:
        with torch.no_grad():
            attn.sigma.uniform_(0.5, 1.3)
    x = torch.randn(2, t, cfg.hidden_size, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, m, cfg.hidden_size, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * m, [True, True, False, True, False, False]])
    clamped = 0
    rows = []
    for b in range(2):
        kept = [j for j in range(m) if mask[b, j]]
        q, k, v = (proj(y).view(-1, h, d) for proj, y in ((attn.q_proj, x[b]), (attn.k_proj, memory[b]), (attn.v_proj, memory[b])))
        for i in range(t):
            heads = []
            for n in range(h):
                if cfg.attention == "softmax":
                    weights = [(q[i, n].dot(k[j, n]) / d**0.5).exp() for j in kept]
                elif exact:
                    unit = lambda y: y / (y.norm() + 1e-3)
                    weights = [(-(attn.sigma[n] * (unit(q[i, n]) - unit(k[j, n]))).square().sum() / 2).exp() for j in kept]
                else:
                    w = None if attn.sigma is None else attn.random_matrices[n] * attn.sigma[n]
                    weights = [plain_kernel(cfg.feature_map, q[i, n], k[j, n], w) for j in kept]
                floor = 0.3 * len(kept) if has_floor else 0.0
                clamped += sum(weights).item() < floor
                heads.append(sum(w * v[j, n] for w, j in zip(weights, kept)) / sum(weights).clamp_min(floor))
            rows.append(attn.o_proj(torch.cat(heads)))
    want = torch.stack(rows).view(2, t, -1)
    found = attn(x, attn.read(memory, mask))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    assert clamped or not has_floor
    leaves = [x, memory, *attn.parameters()]
    for a, b in zip(torch.autograd.grad(found.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves)):
        assert a.abs().sum() > 0
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@EACH
@torch.no_grad()
def test_padding_changes_nothing(cfg):
    m = model(cfg)
    lengths = [(4, 7), (9, 3)]
    source, target = ids(2, 9), ids(2, 7, seed=2)
    mask = torch.arange(9) < torch.tensor([[s] for s, _ in lengths])
    together = m(source, mask, target)
    labels = target.clone()
    for row, (s, t) in enumerate(lengths):
        alone = m(source[row : row + 1, :s], None, target[row : row + 1, :t])
        torch.testing.assert_close(together[row, :t], alone[0], rtol=1e-4, atol=1e-5)
        labels[row, t:] = IGNORED
    losses = [m(source[r : r + 1, :s], None, target[r : r + 1, :t], labels[r : r + 1, :t], 0.1) for r, (s, t) in enumerate(lengths)]
    torch.testing.assert_close(m(source, mask, target, labels, 0.1), sum(losses))
    source[0, 5:] = 3  # the ids in padding have no effect
    torch.testing.assert_close(m(source, mask, target), together, rtol=1e-4, atol=1e-5)
    for row, (s, _) in enumerate(lengths):
        assert m.greedy(source, mask, 6, 0)[row] == m.greedy(source[row : row + 1, :s], None, 6, 0)[0]


@EACH
def test_every_parameter_is_trained_and_dropout_applies_only_in_training(cfg):
    m = Seq2Seq(cfg, dropout=0.3)
    m.init_weights(1.0, 32.0, seed=1)
    source, target = ids(2, 9), ids(2, 7, seed=2)
    m.train()(source, None, target, target, 0.1).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in m.parameters())
    assert not torch.equal(m(source, None, target), m(source, None, target))
    m.eval()
    assert torch.equal(m(source, None, target), m(source, None, target))


def test_the_twins_begin_with_the_same_weights():
    twins = [Seq2Seq(dataclasses.replace(cfg, tie_word_embeddings=True)) for cfg in (RFA, SOFTMAX)]
    for twin in twins:
        twin.init_weights(1.0, 32.0, seed=7)
    a, b = (dict(twin.named_parameters()) for twin in twins)
    assert set(a) - set(b) == {name for name in a if "gate." in name and "mlp" not in name or "sigma" in name}
    assert all(torch.equal(a[name], b[name]) for name in b)
    again = Seq2Seq(RFA)
    again.init_weights(1.0, 32.0, seed=7)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in twins[0].state_dict().items())


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention": "hybrid", "sliding_window": 8}, "model.attention: must be rfa or softmax in an encoder-decoder, found 'hybrid'"),
    ({"feature_map": "favor"}, "model.feature_map: must be gaussian, arc_cosine or elu in an encoder-decoder, found 'favor'"),
    ({"output_norm": True}, "model.output_norm: must be false in an encoder-decoder, found True"),
    ({"position_embedding": "none", "head_dim": 7}, "model.head_dim: must be even for the encoder's rotary positions, found 7"),
    ({"encoder_layers": 0}, "model.encoder_layers: must be 1 to 1024, found 0"),
    ({"encoder_layers": 1025}, "model.encoder_layers: must be 1 to 1024, found 1025"),
    ({"max_source_positions": 0}, "model.max_source_positions: must be 1 to 65536, found 0"),
    ({"max_source_positions": 65537}, "model.max_source_positions: must be 1 to 65536, found 65537"),
    ({"decoder_start_token_id": 32}, "model.decoder_start_token_id: must be below vocab_size, found 32"),
    ({"cross_proj_dim": 0}, "model.cross_proj_dim: must be 1 to 4096, found 0"),
    ({"cross_proj_dim": 4097}, "model.cross_proj_dim: must be 1 to 4096, found 4097"),
    ({"feature_map": "elu", "cross_proj_dim": 8}, "model.cross_proj_dim: must be absent without random vectors, found 8"),
    ({"attention": "softmax"}, "model.sliding_window: must be 1 or more"),
])
def test_an_impossible_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RFA, **changes)


def test_the_state_is_counted():
    convolutions = lambda state: sum(own.conv.numel() for own in state.own)
    m = model(RFA)
    state = m.begin(ids(1, 5))
    numbers = sum(x.numel() for kept in (*state.own, *state.cross) for x in (kept.s, kept.c)) + convolutions(state)
    # The tensors hold one c per source for all heads; `state_numbers` counts one per head.
    assert RFA.state_numbers == numbers + RFA.num_hidden_layers * (RFA.num_attention_heads - 1) + 1  # and the source's tokens
    state = model(SOFTMAX).begin(ids(1, SOFTMAX.max_source_positions))
    numbers = sum(x.numel() for layer in (*state.own, *state.cross) for x in (layer.k, layer.v)) + convolutions(state)
    assert SOFTMAX.state_numbers == numbers + 1


@EACH
@torch.no_grad()
def test_a_folder_is_read_back(cfg, folder, tmp_path):
    m = model(cfg, vocab_size=300)
    export.write_folder(m, folder / "tokenizer.json", tmp_path, "f32")
    again, tok = export.load_folder(tmp_path)
    source, target = ids(2, 9), ids(2, 7, seed=2)
    assert again.cfg == m.cfg and tok.encode("a").ids[0] == 0
    assert torch.equal(again(source, None, target), m(source, None, target))
    keys = json.loads((tmp_path / "config.json").read_text())
    assert keys["model_type"] == "rfa_seq2seq" and (keys["encoder_layers"], keys["max_source_positions"]) == (2, 24)
    names = set(load_file(tmp_path / "model.safetensors"))
    for name in ("encoder.layers.1.self_attn.o_proj.weight", "encoder.layers.0.mlp.gate_proj.weight", "encoder.norm.weight",
                 "model.layers.1.cross_attn_layernorm.weight", "model.layers.0.cross_attn.v_proj.weight"):
        assert name in names
    assert ("model.layers.0.cross_attn.sigma" in names) == ("model.layers.1.cross_attn.random_matrices" in names) == cfg.has_sigma
    with pytest.raises(ValueError, match="must be a decoder's folder"):
        (tmp_path / "text.txt").write_text("A line.")
        export.evaluate_folder(tmp_path, tmp_path / "text.txt")


def test_the_written_fixtures_equal_the_committed_ones(tmp_path):
    seq2seq_fixture.write_all(tmp_path)
    kept = Path(__file__).resolve().parents[3] / "model" / "tests" / "fixtures-seq2seq"
    for name in seq2seq_fixture.CASES:
        assert (kept / name / "config.json").read_text() == (tmp_path / name / "config.json").read_text()
        for file in ("model.safetensors", "golden.safetensors"):
            a, b = load_file(kept / name / file), load_file(tmp_path / name / file)
            assert set(a) == set(b)
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)
