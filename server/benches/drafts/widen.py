"""Writes an 88M-parameter model that computes the same as the shipped model, and copies of the latter without one layer.

    python widen.py weights/checkpoints/tidegate-tiny OUT

`tidegate bench --draft --model OUT/wide --draft-model OUT/without-3` then measures what a draft model saves when both have
learned the same language. The weights added to the wide model are zero or read only zeros, and cost the same as others.
Needs torch and safetensors.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# The shape of `tidegate bench --shape 125m`.
HIDDEN, INTERMEDIATE, LAYERS, HEADS = 768, 2048, 12, 12


def padded(tensor, *shape):
    result = torch.zeros(shape, dtype=tensor.dtype)
    result[tuple(slice(size) for size in tensor.shape)] = tensor
    return result


def repeated(tensor, heads):
    """Repeats the random vectors of the heads for the added heads, which only read zeros and may use any vectors."""
    return tensor.repeat(math.ceil(heads / len(tensor)), *[1] * (tensor.dim() - 1))[:heads].contiguous()


def widened(name, tensor, scale):
    if name.endswith("norm.weight"):
        # RMSNorm takes the mean square over more elements; `scale` compensates.
        return padded((tensor.float() * scale).to(tensor.dtype), HIDDEN)
    if name.endswith(("random_matrices", "sigma")):
        return repeated(tensor, HEADS)
    shapes = {
        "gate.bias": (HEADS,),
        "gate.weight": (HEADS, HIDDEN),
        "gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "up_proj.weight": (INTERMEDIATE, HIDDEN),
        "down_proj.weight": (HIDDEN, INTERMEDIATE),
        "embed_tokens.weight": (tensor.shape[0], HIDDEN),
    }
    name = ".".join(name.split(".")[-2:])
    return padded(tensor, *shapes.get(name, (HIDDEN, HIDDEN)))


def main():
    source, out = map(Path, sys.argv[1:])
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    shared = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}

    def layer(index):
        start = f"model.layers.{index}."
        return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

    def write(folder, tensors, config):
        folder.mkdir(parents=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(source / name, folder)

    layers = [layer(index) for index in range(config["num_hidden_layers"])]
    scale = math.sqrt(config["hidden_size"] / HIDDEN)
    # The layers added at the end output zero.
    silent = {name: tensor * 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor for name, tensor in layers[0].items()}
    wide = layers + [silent] * (LAYERS - len(layers))
    wide = {f"model.layers.{index}.{name}": tensor for index, layer in enumerate(wide) for name, tensor in layer.items()}
    wide = {name: widened(name, tensor, scale) for name, tensor in (shared | wide).items()}
    shape = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    write(out / "wide", wide, config | shape | {"rms_norm_eps": config["rms_norm_eps"] * scale**2})
    for left_out in range(len(layers)):
        kept = layers[:left_out] + layers[left_out + 1 :]
        some = {f"model.layers.{index}.{name}": tensor for index, layer in enumerate(kept) for name, tensor in layer.items()}
        write(out / f"without-{left_out}", shared | some, config | {"num_hidden_layers": len(kept)})


main()
