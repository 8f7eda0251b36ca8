"""Golden fixtures of the encoder-decoder: tiny random models with inputs, logits and states.

`<name>/config.json` and `<name>/model.safetensors` are a checkpoint as `export` writes it; `<name>/golden.safetensors`, for
each example J, a sentence pair of its own length, and each decoder layer N (f32 except for the ids):

    J.source          int64 (M), the first is 0
    J.target          int64 (T), the first is decoder_start_token_id
    J.memory          (M, hidden), the encoder's output
    J.logits          (T, vocab), with teacher forcing
    J.cross.N.s, .z, .c    rfa: (heads, features, head_dim), (heads, features), (1): the number of source tokens
    J.cross.N.k, .v   softmax: (heads, M, head_dim) each
    J.self.N.s, .z, .c     rfa: the self attention's sums after the last target token: as above, but c is (heads)

The Rust tests do not read `memory`; it helps to find the layer that differs. `python -m tidegate_training.fixtures`
rewrites the fixtures in `model/tests/fixtures-seq2seq`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .export import write_model
from .randomise import randomise
from .seq2seq import CrossKeys, Seq2Seq, Seq2SeqConfig

RFA = Seq2SeqConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
                    proj_dim=8, position_embedding="rope", rope_theta=100.0, encoder_layers=2, max_source_positions=24,
                    decoder_start_token_id=1, conv_kernel=3, cross_proj_dim=20)
# A window longer than any target, as in translation; an untied head, so that tied and untied heads are both covered.
SOFTMAX = dataclasses.replace(RFA, attention="softmax", sliding_window=16, tie_word_embeddings=False, decoder_start_token_id=0,
                              cross_proj_dim=None)
PLAIN = dataclasses.replace(RFA, conv_kernel=0, cross_proj_dim=None)
# Arc-cosine features have no denominator floor; if they had one, a floor of this size would change every output.
ARC_COSINE = dataclasses.replace(PLAIN, feature_map="arc_cosine", gate=False, denominator_eps=1.0)
ELU = dataclasses.replace(PLAIN, feature_map="elu")
CASES = {"seq2seq-rfa": RFA, "seq2seq-softmax": SOFTMAX, "seq2seq-arc-cosine": ARC_COSINE, "seq2seq-elu": ELU}
# Numbers of source and target tokens: ordinary sentences, a source of a single token, and the longest source allowed.
LENGTHS = ((7, 9), (1, 3), (24, 12))


def halves(s: Tensor) -> dict[str, Tensor]:
    """Splits sums (heads, features, head_dim + 1) into S and z."""
    return {"s": s[..., :-1], "z": s[..., -1]}


@torch.no_grad()
def example(model: Seq2Seq, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Returns a model's logits and states for one pair. source, target: (time), including their first tokens"""
    ids = source.unsqueeze(0)
    logits, state = model.decode(target.unsqueeze(0), model.begin(ids))
    out = {"source": source, "target": target, "memory": model.encode(ids)[0], "logits": logits[0]}
    for n, (cross, own) in enumerate(zip(state.cross, state.own)):
        if isinstance(cross, CrossKeys):
            out |= {f"cross.{n}.k": cross.k[0], f"cross.{n}.v": cross.v[0]}
            continue
        for name, parts in (("cross", halves(cross.s[0]) | {"c": cross.c}), ("self", halves(own.s[0]) | {"c": own.c[0]})):
            out |= {f"{name}.{n}.{part}": x for part, x in parts.items()}
    return out


def write_case(out: Path, cfg: Seq2SeqConfig, seed: int) -> None:
    """Writes the folder of one case."""
    gen = torch.Generator().manual_seed(seed)
    model = Seq2Seq(cfg).eval()
    randomise(model, gen)
    write_model(model, out, "f32")
    golden = {}
    for j, lengths in enumerate(LENGTHS):
        source, target = (torch.randint(2, cfg.vocab_size, (n,), generator=gen) for n in lengths)
        source[0], target[0] = 0, cfg.decoder_start_token_id
        golden |= {f"{j}.{name}": x.contiguous() for name, x in example(model, source, target).items()}
    save_file(golden, out / "golden.safetensors")
    (out / "golden.safetensors").chmod(0o644)


def write_all(out: Path) -> None:
    """Writes every case under `out`; the bytes are always the same."""
    for seed, (name, cfg) in enumerate(CASES.items()):
        write_case(out / name, cfg, seed=4000 + seed)
