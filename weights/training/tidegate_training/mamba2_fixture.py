"""Golden fixtures of Mamba-2: tiny random models with reference outputs from PyPI's `transformers` (pure PyTorch on the
CPU).

`config.json` and `model.safetensors` are a checkpoint in the layout that is published on Hugging Face; `golden.safetensors`
has `ids`, int64 (1000), and for each NORM of `whole` and `groups`, each J of `AFTER`, each layer N:

    NORM.J.logits      f32 (vocab), after the first J tokens
    NORM.J.N.s         f32 (heads, state_size, head_dim), a row for each element of B, after J tokens
    NORM.J.N.inputs    f32 (conv_kernel - 1, channels), the last inputs of the convolution, oldest first

`transformers` 5 normalizes the channels of each group of heads separately (`groups`). So does the package `mamba_ssm`, with
which models with several groups were trained. Older versions normalize all channels together; for `whole`, the gated norm
has a single group.

`fixtures-mamba2-llamacpp` is a second model, of a shape that llama.cpp supports (no biases of projections, no limits of
time steps), with a tokenizer like GPT-NeoX's. It has the golden numbers of `groups` only. `llamacpp.gguf` is the output of
llama.cpp's `convert_hf_to_gguf.py --outtype f32` for that folder. The converter recognizes a pre-tokenizer by how the
published vocabulary encodes one test text, so for this vocabulary `get_vocab_base_pre` must be made to return `olmo`, as
for GPT-NeoX's.

`python -m tidegate_training.mamba2_fixture` rewrites both folders in `model/tests`, except for `llamacpp.gguf`. It needs
`pip install 'transformers>=5.23'`, which nothing else does.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

AFTER = (1, 10, 1000)
CONFIG = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 97, "hidden_size": 32,
    "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 12, "n_groups": 2, "conv_kernel": 4,
    "chunk_size": 64, "layer_norm_epsilon": 1e-5, "use_bias": True, "use_conv_bias": True, "hidden_act": "silu",
    "rms_norm": True, "residual_in_fp32": True, "time_step_limit": [0.01, 2.0], "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "torch_dtype": "bfloat16",
}
LLAMACPP = CONFIG | {"vocab_size": 288, "use_bias": False, "time_step_limit": [0.0, 1e30]}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"


def model(config: dict) -> torch.nn.Module:
    """Returns the model of `transformers`, before its weights are set."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    keys = {name: value for name, value in config.items() if name not in ("architectures", "model_type", "torch_dtype")}
    return Mamba2ForCausalLM(Mamba2Config(**keys | {"time_step_limit": tuple(config["time_step_limit"])})).float().eval()


def weights(shapes: dict[str, Tensor], gen: torch.Generator) -> dict[str, Tensor]:
    """Returns random bf16 tensors with these names and shapes; none is all zeros or all ones."""
    out = {}
    for name, x in sorted(shapes.items()):
        # Mean and scale for norms and D, A_log (half-lives from less than a token to a few dozen), dt_bias, biases, and
        # matrices.
        mean, scale = 0.0, x.shape[-1] ** -0.5
        if name.endswith(("norm.weight", "norm_f.weight", "mixer.D")):
            mean, scale = 1.0, 0.2
        elif name.endswith("A_log"):
            mean, scale = 0.0, 0.6
        elif name.endswith("dt_bias"):
            mean, scale = -1.5, 1.0
        elif name.endswith(".bias"):
            scale = 0.2
        out[name] = (mean + scale * torch.randn(x.shape, generator=gen)).bfloat16()
    return out


def golden(net: torch.nn.Module, ids: Tensor, norm: str) -> dict[str, Tensor]:
    """Returns the model's logits and states; each text is read in one pass."""
    out = {}
    for after in AFTER:
        read = net(ids[None, :after], use_cache=True)
        out[f"{norm}.{after}.logits"] = read.logits[0, -1]
        for n, layer in enumerate(read.cache_params.layers):
            # Shapes: (1, heads, head_dim, state_size) and (1, channels, conv_kernel); the latter holds one input more than
            # the next token needs.
            out[f"{norm}.{after}.{n}.s"] = layer.recurrent_states[0][0].transpose(1, 2)
            out[f"{norm}.{after}.{n}.inputs"] = layer.conv_states[0][0, :, 1:].t()
    return {name: x.detach().float().clone().contiguous() for name, x in out.items()}


def tokenizer() -> Tokenizer:
    """Returns a tokenizer like GPT-NeoX's with few merges: normalization form C, two special tokens, and tokens of several
    spaces."""
    out = Tokenizer(models.BPE())
    out.normalizer, out.decoder = normalizers.NFC(), decoders.ByteLevel()
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|padding|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    out.train_from_iterator(["the river and the fox in the thin rain"] * 9, trainer)
    out.add_tokens([AddedToken(" " * count, normalized=True) for count in (3, 2)])
    return out


def write_folder(out: Path, config: dict, tensors: dict[str, Tensor], content: dict[str, Tensor]) -> None:
    """Writes a checkpoint and its golden numbers."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, parts in (("model", tensors), ("golden", content)):
        save_file(parts, out / f"{name}.safetensors", metadata={"format": "pt"})
        (out / f"{name}.safetensors").chmod(0o644)


def randomised(config: dict, seed: int) -> tuple[torch.nn.Module, dict[str, Tensor], Tensor]:
    """Returns a model with random weights, its tensors, and input ids for it."""
    gen = torch.Generator().manual_seed(seed)
    net = model(config)
    tensors = weights(net.state_dict(), gen)
    net.load_state_dict({name: x.float() for name, x in tensors.items()})
    return net, tensors, torch.randint(config["vocab_size"], (AFTER[-1],), generator=gen)


@torch.no_grad()
def write(tests: Path) -> None:
    """Writes the folders; the weights and ids are always the same."""
    net, tensors, ids = randomised(CONFIG, 2024)
    content = {"ids": ids} | golden(net, ids, "groups")
    inner = CONFIG["num_heads"] * CONFIG["head_dim"]
    for layer in net.backbone.layers:
        assert layer.mixer.norm.group_size == inner // CONFIG["n_groups"]
        layer.mixer.norm.group_size = inner
    write_folder(tests / "fixtures-mamba2", CONFIG, tensors, content | golden(net, ids, "whole"))

    net, tensors, ids = randomised(LLAMACPP, 2025)
    out = tests / "fixtures-mamba2-llamacpp"
    write_folder(out, LLAMACPP, tensors, {"ids": ids} | golden(net, ids, "groups"))
    tokenizer().save(str(out / "tokenizer.json"), pretty=False)
    keys = {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "add_prefix_space": False, "chat_template": TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[3] / "model" / "tests")
