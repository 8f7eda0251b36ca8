"""The golden fixture of RecurrentGemma: a tiny random model, and what PyPI's `transformers` (pure PyTorch on the CPU) makes
of it.

`config.json` and `model.safetensors` are a checkpoint in the layout that is published on Hugging Face. `golden.safetensors`
has `ids`, int64 (1000), and for each J of `AFTER` and each layer N:

    J.logits     f32 (vocab), after the first J tokens
    J.N.h        f32 (lru_width), the recurrence of a recurrent layer
    J.N.inputs   f32 (conv1d_width - 1, lru_width), the last inputs of its convolution, oldest first
    J.N.keys     f32 (tokens, key heads, head_dim), of a layer with attention: the last keys that it keeps, oldest first
    J.N.values   f32 (tokens, key heads, head_dim)

`python -m tidegate_training.recurrent_gemma_fixture` rewrites `model/tests/fixtures-recurrent-gemma`; it needs `pip install
'transformers>=5.24'`, which nothing else does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .mamba2_fixture import AFTER, write_folder

CONFIG = {
    "architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 80, "num_hidden_layers": 5, "block_types": ["recurrent", "recurrent", "attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "lru_width": 32, "attention_window_size": 24,
    "conv1d_width": 4, "logits_soft_cap": 30.0, "rms_norm_eps": 1e-6, "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0, "torch_dtype": "bfloat16",
}


def model() -> torch.nn.Module:
    """The model of `transformers`, its weights not set."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    other = ("architectures", "model_type", "torch_dtype", "head_dim")
    keys = {name: value for name, value in CONFIG.items() if name not in other}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**keys, attn_implementation="eager")).float().eval()


def weights(shapes: dict[str, Tensor], gen: torch.Generator) -> dict[str, Tensor]:
    """Random tensors in bf16 of these names and shapes. The head is tied to the embedding."""
    out = {}
    for name, x in sorted(shapes.items()):
        # Norms are stored less 1. The recurrence has half-lives from a token to some hundreds.
        mean, scale = 0.0, x.shape[-1] ** -0.5
        if name.endswith("norm.weight"):
            scale = 0.2
        elif name.endswith("recurrent_param"):
            mean, scale = -5.0, 1.5
        elif name.endswith("bias"):
            scale = 0.2
        elif "q_proj" in name or "k_proj" in name:
            scale *= 2  # attention that prefers some tokens
        if name != "lm_head.weight":
            out[name] = (mean + scale * torch.randn(x.shape, generator=gen)).bfloat16()
    return out


def golden(net: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Logits and states of the model, each text read at once."""
    from transformers import DynamicCache

    out = {}
    for after in AFTER:
        # The model resets its recurrences only if it makes the cache itself, but it does not return that.
        cache = DynamicCache(config=net.config)
        net.model._setup_cache(net.config, 1, ids.device, torch.float32)
        out[f"{after}.logits"] = net(ids[None, :after], use_cache=True, cache=cache).logits[0, -1]
        for n, layer in enumerate(net.model.layers):
            block = layer.temporal_block
            if hasattr(block, "rg_lru"):
                out[f"{after}.{n}.h"] = block.rg_lru.recurrent_states[0]
                out[f"{after}.{n}.inputs"] = block.conv1d_state[0].t()
            else:
                for name, kept in (("keys", cache.layers[n].keys), ("values", cache.layers[n].values)):
                    out[f"{after}.{n}.{name}"] = kept[0].transpose(0, 1)
    return {name: x.detach().float().clone().contiguous() for name, x in out.items()}


@torch.no_grad()
def write(out: Path) -> None:
    """Writes the folder, always with the same weights and ids."""
    gen = torch.Generator().manual_seed(2026)
    net = model()
    tensors = weights(net.state_dict(), gen)
    missing, extra = net.load_state_dict({name: x.float() for name, x in tensors.items()}, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not extra
    net.tie_weights()
    ids = torch.randint(CONFIG["vocab_size"], (AFTER[-1],), generator=gen)
    write_folder(out, CONFIG, tensors, {"ids": ids} | golden(net, ids))


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[3] / "model" / "tests" / "fixtures-recurrent-gemma")
