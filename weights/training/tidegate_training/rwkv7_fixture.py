"""The golden fixture of RWKV-7: a tiny random model with reference outputs from PyPI's `rwkv` (pure PyTorch on the CPU).

`config.json` and `model.safetensors` are a checkpoint in the layout that is published on Hugging Face; `golden.safetensors`
has, for each J of `AFTER` and each layer N:

    ids           int64 (1000)
    J.logits      f32 (vocab), after the first J tokens
    J.N.s         f32 (heads, head_dim, head_dim), a row for each element of a key, after J tokens
    J.N.inputs    f32 (2, hidden), the last inputs of the time mix and of the channel mix

`llamacpp.gguf` is the output of llama.cpp's `convert_hf_to_gguf.py --outtype bf16` for the folder and any vocabulary of
fewer than 97 tokens.

`package.pth` has a smaller model in the form in which RWKV's author publishes models: in the package's layout, in bf16, by
`torch.save`, without a config. It has enough tokens for all single bytes.

`python -m tidegate_training.rwkv7_fixture` rewrites all files but `llamacpp.gguf` in `model/tests/fixtures-rwkv7`. It needs
`pip install rwkv==0.8.32`, which nothing else does.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

AFTER = (1, 10, 1000)
LAYERS, HIDDEN, HEAD, INNER, VOCAB = 2, 128, 64, 160, 97
RANKS = {"w": 16, "a": 12, "v": 8, "g": 24}
CONFIG = {
    "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "hidden_size": HIDDEN, "hidden_ratio": INNER / HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": HEAD, "num_heads": HIDDEN // HEAD,
    "value_dim": [HIDDEN] * LAYERS, "decay_low_rank_dim": RANKS["w"], "a_low_rank_dim": RANKS["a"],
    "v_low_rank_dim": RANKS["v"], "gate_low_rank_dim": RANKS["g"], "hidden_act": "sqrelu", "attn": None, "attn_mode": "chunk",
    "norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "fuse_norm": False, "fuse_cross_entropy": True, "use_cache": True,
    "max_position_embeddings": 2048, "initializer_range": 0.02, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "vocab_size": VOCAB, "torch_dtype": "bfloat16", "transformers_version": "4.48.0",
}
# Parts of tensor names: Hugging Face's, which are ours, and the package's.
NAMES = [
    ("model.embeddings.", "emb."), ("model.norm.", "ln_out."), ("lm_head.", "head."), ("model.layers.", "blocks."),
    (".pre_norm.", ".ln0."), (".attn_norm.", ".ln1."), (".ffn_norm.", ".ln2."), (".attn.", ".att."), ("r_proj.", "receptance."),
    ("k_proj.", "key."), ("v_proj.", "value."), ("o_proj.", "output."), ("g_norm.", "ln_x."),
]


def weights(gen: torch.Generator, hidden: int, inner: int, vocab: int) -> dict[str, Tensor]:
    """Returns random bf16 tensors by their published names; none is all zeros or all ones."""
    out = {}

    def add(name: str, *shape: int, mean: float = 0.0, scale: float | None = None) -> None:
        scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
        out[name] = (mean + scale * torch.randn(shape, generator=gen)).bfloat16()

    def norm(name: str) -> None:
        add(f"{name}.weight", hidden, mean=1.0, scale=0.2)
        add(f"{name}.bias", hidden, scale=0.2)

    add("model.embeddings.weight", vocab, hidden)
    norm("model.norm")
    add("lm_head.weight", vocab, hidden)
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for name in ("attn_norm", "ffn_norm", "attn.g_norm", *(["pre_norm"] if n == 0 else [])):
            norm(f"{layer}.{name}")
        for part in "rwkvag":
            add(f"{layer}.attn.x_{part}", 1, 1, hidden, mean=0.5, scale=0.2)
        for part in "rkvo":
            add(f"{layer}.attn.{part}_proj.weight", hidden, hidden)
        for part, rank in RANKS.items():
            if part == "v" and n == 0:
                continue
            add(f"{layer}.attn.{part}_lora.lora.0.weight", rank, hidden)
            add(f"{layer}.attn.{part}_lora.lora.2.weight", hidden, rank)
            if part != "g":
                # For `w`, decays with half-lives from one token to a few dozen.
                add(f"{layer}.attn.{part}_lora.lora.2.bias", hidden, mean=-2.0 if part == "w" else 0.0, scale=1.5)
        add(f"{layer}.attn.k_k", hidden, mean=0.8, scale=0.2)
        add(f"{layer}.attn.k_a", hidden, mean=1.0, scale=0.1)
        add(f"{layer}.attn.r_k", hidden // HEAD, HEAD, scale=0.2)
        add(f"{layer}.ffn.x_k", hidden, mean=0.5, scale=0.2)
        add(f"{layer}.ffn.key.weight", inner, hidden)
        add(f"{layer}.ffn.value.weight", hidden, inner)
    return out


def for_package(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors in the package's layout: other names, and low-rank matrices transposed."""
    out = {}
    for name, x in tensors.items():
        for ours, theirs in NAMES:
            name = name.replace(ours, theirs)
        for layer, number in (("_lora.lora.0.weight", "1"), ("_lora.lora.2.weight", "2"), ("_lora.lora.2.bias", "0")):
            if name.endswith(layer):
                name, x = name.removesuffix(layer) + number, x.t() if number != "0" else x
        vector = x.dim() == 1 and name.startswith("blocks.") and ".ln" not in name
        out[name] = (x.view(1, 1, -1) if vector else x).contiguous()
    # The first layer has no values to mix with, but the package expects the tensors.
    for number in "012":
        out[f"blocks.0.att.v{number}"] = torch.zeros_like(out[f"blocks.1.att.v{number}"])
    return out


def golden(tensors: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Returns the package's logits and states."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    from rwkv.model import RWKV

    with tempfile.TemporaryDirectory() as folder:
        wide = {name: x.float() for name, x in for_package(tensors).items()}
        torch.save(wide, Path(folder) / "model.pth")
        model = RWKV(model=str(Path(folder) / "model"), strategy="cpu fp32")
    out, state, read = {"ids": ids}, None, 0
    for after in AFTER:
        logits, state = model.forward(ids[read:after].tolist(), state)
        read = after
        out[f"{after}.logits"] = logits[:VOCAB].clone()
        for n in range(LAYERS):
            time_input, s, channel_input = state[3 * n : 3 * n + 3]
            # The package has a row for each element of a value.
            out[f"{after}.{n}.s"] = s.transpose(1, 2).clone().contiguous()
            out[f"{after}.{n}.inputs"] = torch.stack([time_input, channel_input]).clone()
    return {name: x if name == "ids" else x.float() for name, x in out.items()}


@torch.no_grad()
def write(out: Path) -> None:
    """Writes the folder; the weights and ids are always the same."""
    gen = torch.Generator().manual_seed(7000)
    tensors = weights(gen, HIDDEN, INNER, VOCAB)
    ids = torch.randint(VOCAB, (AFTER[-1],), generator=gen)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    torch.save(for_package(weights(torch.Generator().manual_seed(7001), HEAD, HEAD, 272)), out / "package.pth")
    for name, content in (("model", tensors), ("golden", golden(tensors, ids))):
        save_file(content, out / f"{name}.safetensors", metadata={"format": "pt"})
        (out / f"{name}.safetensors").chmod(0o644)


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[3] / "model" / "tests" / "fixtures-rwkv7")
