"""Golden fixtures: tiny random models of each kind with inputs, logits and states, which the Rust tests read.

`<name>/config.json` and `<name>/model.safetensors` are a checkpoint as `export` writes it; `<name>/golden.safetensors`:

    ids      int64 (batch, time)              longer than a chunk of 64
    logits   f32 (batch, time, vocab)
    state.N.s     f32 (batch, heads, features, head_dim + 1), after the last token; the last column is z
    state.N.c     f32 (batch, heads)
    state.N.m     f32 (batch, heads), the logarithm of the largest feature of a key; only for favor
    state.N.conv  f32 (batch, 3, conv_kernel - 1, heads * head_dim), only with a convolution

`write_eval` writes a checkpoint folder with a tokenizer, texts, and their scores from `evaluate_folder`. The fixtures of
the encoder-decoders are in `seq2seq_fixture.py`. `python -m tidegate_training.fixtures` rewrites all of them in the
repository.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from . import seq2seq_fixture
from .config import ModelConfig
from .data import EOT, train_tokenizer
from .export import evaluate_folder, tensors, write_folder, write_model
from .model import Decoder
from .randomise import randomise

BASE = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                   head_dim=8, proj_dim=8, output_norm=False)
SHIPPED = dataclasses.replace(BASE, output_norm=True, conv_kernel=4)
ROPE = dataclasses.replace(BASE, position_embedding="rope", rope_theta=100.0)

# name: (config, dtype of the weights, batch, time)
CASES: dict[str, tuple[ModelConfig, str, int, int]] = {
    "base": (BASE, "f32", 2, 70),
    "conv-norm": (SHIPPED, "f32", 2, 70),
    "no-gate": (dataclasses.replace(BASE, gate=False), "f32", 2, 70),
    "rope": (ROPE, "f32", 2, 70),
    "untied": (dataclasses.replace(BASE, tie_word_embeddings=False), "f32", 2, 70),
    "wide-features": (dataclasses.replace(BASE, head_dim=16, proj_dim=12, denominator_eps=0.05), "f32", 2, 70),
    "clamped": (dataclasses.replace(BASE, denominator_eps=0.6), "f32", 1, 70),
    "long": (dataclasses.replace(SHIPPED, conv_kernel=3), "f32", 1, 200),
    "f16": (SHIPPED, "f16", 2, 70),
    "bf16": (SHIPPED, "bf16", 2, 70),
    "softmax": (dataclasses.replace(ROPE, attention="softmax", sliding_window=128), "f32", 2, 70),
    "softmax-window": (dataclasses.replace(ROPE, attention="softmax", sliding_window=24), "f32", 2, 70),
    "arc-cosine": (dataclasses.replace(BASE, feature_map="arc_cosine"), "f32", 2, 70),
    "arc-cosine-no-gate": (dataclasses.replace(ROPE, feature_map="arc_cosine", gate=False), "f32", 2, 70),
    "elu": (dataclasses.replace(BASE, feature_map="elu"), "f32", 2, 70),
    "elu-no-gate": (dataclasses.replace(ROPE, feature_map="elu", gate=False), "f32", 2, 70),
    "favor": (dataclasses.replace(BASE, feature_map="favor", proj_dim=12), "f32", 2, 70),
    "favor-no-gate": (dataclasses.replace(ROPE, feature_map="favor", gate=False), "f32", 2, 70),
    "hybrid": (dataclasses.replace(ROPE, attention="hybrid", sliding_window=16), "f32", 2, 70),
    "hybrid-no-gate": (dataclasses.replace(ROPE, attention="hybrid", sliding_window=16, gate=False), "f32", 2, 70),
}


@torch.no_grad()
def write_case(out: Path, cfg: ModelConfig, dtype: str, batch: int, time: int, seed: int) -> None:
    """Writes the folder of one case. The golden values are computed in f32 from the stored weights."""
    gen = torch.Generator().manual_seed(seed)
    model = Decoder(cfg).eval()
    randomise(model, gen)
    write_model(model, out, dtype)
    # The Rust tests compute with the rounded weights of a 16-bit file.
    model.load_state_dict({k: v.float() for k, v in tensors(model, dtype).items()})
    ids = torch.randint(cfg.vocab_size, (batch, time), generator=gen)
    logits, states = model(ids, model.new_state(batch))
    golden = {"ids": ids, "logits": logits}
    for n, state in enumerate(states):
        parts = {part: getattr(state, part, None) for part in ("s", "c", "m", "conv")}
        golden |= {f"state.{n}.{part}": x for part, x in parts.items() if x is not None}
    save_file({k: v.contiguous() for k, v in golden.items()}, out / "golden.safetensors")
    (out / "golden.safetensors").chmod(0o644)


def write_all(out: Path) -> None:
    """Writes every case under `out`; the bytes are always the same."""
    for seed, (name, case) in enumerate(CASES.items()):
        write_case(out / name, *case, seed=1000 + seed)


LINES = """The river rose in the night, and by morning the lower field was a lake.
"You can't cross," said the miller's son; "nobody has crossed since Tuesday."
She had 27 eggs, 3 loaves and a letter to deliver, so she took off her shoes.

Half way over she met a heron. It looked at her — gravely, as herons do — and stepped aside.
Afterwards, in the café by the bridge, they asked what it had cost her.
    "One shoe," she said, "and   two eggs."
""".splitlines()

# <|endoftext|> at both ends, an empty document, Windows line ends, characters that the tokenizer was not trained on, runs
# of whitespace.
MARKED = (f"{EOT}\n\n{LINES[0]}\n{LINES[1]}\n\n{EOT}\n{EOT}{LINES[4]}\r\n{LINES[5]}\r\n\r\n{LINES[6]}\n"
          f"{EOT}\nSchön! 雪が降る \U0001f642\t\t12,345 it's\n  \n   end of it.\n\n{EOT}\n")
PLAIN = "\n".join(LINES * 4) + "\n"


def write_eval(out: Path) -> None:
    """Writes a checkpoint folder, `marked.txt`, `plain.txt`, and `golden.json` with their scores."""
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "lines.txt"
    lines.write_text("\n".join(LINES), encoding="utf-8")
    train_tokenizer([str(lines)], 300, out / "tokenizer.json")
    lines.unlink()
    vocab = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size()
    model = Decoder(dataclasses.replace(SHIPPED, vocab_size=vocab))
    randomise(model, torch.Generator().manual_seed(2000))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.5)
    write_folder(model, out / "tokenizer.json", out, "bf16")
    golden = {}
    for name, text in (("marked.txt", MARKED), ("plain.txt", PLAIN)):
        (out / name).write_bytes(text.encode())
        golden[name] = [{"limit": limit} | evaluate_folder(out, out / name, limit) for limit in (None, 1, 100)]
    (out / "golden.json").write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    repository = Path(__file__).resolve().parents[3]
    write_all(repository / "model" / "tests" / "fixtures")
    seq2seq_fixture.write_all(repository / "model" / "tests" / "fixtures-seq2seq")
    write_eval(repository / "weights" / "tests" / "fixtures" / "tiny")
