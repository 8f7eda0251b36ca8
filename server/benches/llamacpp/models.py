"""Writes models with random weights in the shapes of published ones, as folders in Hugging Face's layout.

    python models.py rwkv7-0.19b mamba2-130m rwkv7-1.5b

llama.cpp's convert_hf_to_gguf.py turns each into a GGUF file. Needs torch and safetensors.
"""

import itertools
import json
import string
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANDOM = torch.Generator().manual_seed(20261123)


def normal(*shape, mean=0.0, std=1.0):
    return torch.randn(*shape, generator=RANDOM) * std + mean


def matrix(rows, columns, gain=1.0):
    """Returns a random matrix that scales the norm of a vector by about `gain`."""
    return normal(rows, columns, std=gain * columns**-0.5).half()


def share(*shape):
    return torch.rand(*shape, generator=RANDOM)


def write(folder, config, tensors, files=()):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in files:
        (folder / name).write_text(text)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    print(folder, f"{sum(t.numel() for t in tensors.values()) / 1e6:.1f} million parameters")


def vocabulary(size=65_529):
    """Returns an RWKV vocabulary file: all bytes, the line end of chats as token 261, and words of two to four letters."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"zqj", b"zqk", b"zqw", b"zqx", b"\n\n"]
    letters = itertools.chain(*(itertools.product(string.ascii_lowercase, repeat=n) for n in (2, 3, 4)))
    tokens += [(" " + "".join(word)).encode() for word in itertools.islice(letters, size - len(tokens))]
    shown = [repr(token.decode()) if token.isascii() else repr(token) for token in tokens]
    return "".join(f"{i} {text} {len(token)}\n" for i, (token, text) in enumerate(zip(tokens, shown), 1))


def rwkv7(folder, layers, hidden, decay, a, v, gate, vocab=65_536):
    heads, inner = hidden // 64, 4 * hidden
    norm = lambda name: {f"{name}.weight": normal(hidden, mean=1, std=0.1), f"{name}.bias": normal(hidden, std=0.1)}
    tensors = {"model.embeddings.weight": normal(vocab, hidden, std=0.5).half(), "lm_head.weight": matrix(vocab, hidden, 1.5)}
    tensors |= norm("model.norm") | norm("model.layers.0.pre_norm")
    for i in range(layers):
        layer = norm("attn_norm") | norm("ffn_norm") | norm("attn.g_norm")
        layer |= {f"attn.x_{part}": share(1, 1, hidden) for part in "rwkvag"}
        layer |= {f"attn.{part}_proj.weight": matrix(hidden, hidden, 0.7) for part in "rkvo"}
        for part, rank in [("w", decay), ("a", a), ("g", gate)] + [("v", v)] * (i > 0):
            layer[f"attn.{part}_lora.lora.0.weight"] = matrix(rank, hidden)
            layer[f"attn.{part}_lora.lora.2.weight"] = matrix(hidden, rank)
            if part != "g":
                layer[f"attn.{part}_lora.lora.2.bias"] = normal(hidden, mean=-2.0 * (part == "w"))
        layer |= {"attn.k_k": normal(hidden, mean=1, std=0.2), "attn.k_a": normal(hidden, mean=1, std=0.1)}
        layer |= {"attn.r_k": normal(heads, 64, std=0.1), "ffn.x_k": share(hidden)}
        layer |= {"ffn.key.weight": matrix(inner, hidden), "ffn.value.weight": matrix(hidden, inner, 0.5)}
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    config = {
        "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": layers, "head_dim": 64, "num_heads": heads, "intermediate_size": inner,
        "decay_low_rank_dim": decay, "a_low_rank_dim": a, "v_low_rank_dim": v, "gate_low_rank_dim": gate,
        "hidden_act": "sqrelu", "norm_eps": 1e-5, "attn": None, "norm_bias": True, "norm_first": True,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    write(folder, config, tensors, [("rwkv_vocab_v20230424.txt", vocabulary())])


def mamba2(folder, layers=24, hidden=768, state=128, vocab=50_288):
    inner = 2 * hidden
    heads, channels = inner // 64, inner + 2 * state
    tensors = {"backbone.embeddings.weight": normal(vocab, hidden, std=0.05).half()}
    tensors["backbone.norm_f.weight"] = normal(hidden, mean=1, std=0.1)
    for i in range(layers):
        layer = {
            "norm.weight": normal(hidden, mean=1, std=0.1),
            "mixer.in_proj.weight": matrix(inner + channels + heads, hidden),
            "mixer.out_proj.weight": matrix(hidden, inner, 0.5),
            "mixer.conv1d.weight": normal(channels, 1, 4, std=0.4),
            "mixer.conv1d.bias": normal(channels, std=0.1),
            "mixer.dt_bias": normal(heads, mean=-3),
            "mixer.A_log": torch.log(1 + 15 * share(heads)),
            "mixer.D": normal(heads, mean=1, std=0.1),
            "mixer.norm.weight": normal(inner, mean=1, std=0.1),
        }
        tensors |= {f"backbone.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    config = {
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_heads": heads, "head_dim": 64, "state_size": state, "n_groups": 1, "expand": 2,
        "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "rms_norm": True, "chunk_size": 256,
    }  # fmt: skip
    write(folder, config, tensors)


SHAPES = {
    "rwkv7-0.19b": lambda folder: rwkv7(folder, 12, 768, 64, 64, 32, 128),
    "rwkv7-1.5b": lambda folder: rwkv7(folder, 24, 2048, 96, 96, 64, 256),
    "mamba2-130m": mamba2,
}

for name in sys.argv[1:]:
    SHAPES[name](name)
