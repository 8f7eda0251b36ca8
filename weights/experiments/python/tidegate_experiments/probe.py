"""Exports the queries, keys and values of a trained softmax model's heads, on which estimates of attention are measured.

The file holds q, k and v, each f32 (cases * layers, heads, tokens, head_dim): after the convolution and the rotary angles,
before any scaling. It has every layer, and the layers of one case are adjacent. The model is causal; `tidegate-experiments
approximation` uses its queries and keys without the mask.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tidegate_training.data import EOT_ID, documents, encode
from tidegate_training.export import load_folder
from tidegate_training.model import Decoder


def windows(stream: Tensor, tokens: int, cases: int) -> Tensor:
    """Returns `cases` pieces of `tokens` ids, spaced evenly over the stream, without overlap: (cases, tokens)."""
    if tokens < 1 or cases < 1:
        raise ValueError(f"--tokens and --cases: must be at least 1, found {tokens} and {cases}")
    if len(stream) < cases * tokens:
        raise ValueError(f"--tokens, --cases: the text must have {cases} times {tokens} tokens, found {len(stream)}")
    begins = [i * (len(stream) - tokens) // max(cases - 1, 1) for i in range(cases)]
    return torch.stack([stream[b : b + tokens] for b in begins])


@torch.no_grad()
def heads(model: Decoder, ids: Tensor) -> dict[str, Tensor]:
    """Returns the inputs of every layer's attention. ids: (cases, tokens) -> q, k, v (cases * layers, heads, tokens,
    head_dim)"""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    layers = [layer.self_attn for layer in model.model.layers]

    def watched(mix):
        def watch(q, k, v, *rest):
            seen.append((q, k, v))
            return mix(q, k, v, *rest)

        return watch

    for layer in layers:
        layer.mix = watched(layer.mix)
    try:
        # Each piece is a separate text; the state is also zeroed where a document starts inside it.
        starts = ids == EOT_ID
        starts[:, 0] = True
        model(ids, model.new_state(len(ids)), starts=starts)
    finally:
        for layer in layers:
            del layer.mix
    stacked = (torch.stack(x, dim=1).flatten(0, 1) for x in zip(*seen))
    return {name: x.float().contiguous() for name, x in zip(("q", "k", "v"), stacked)}


def probe(folder: Path, text: Path, tokens: int | None, cases: int, out: Path) -> dict[str, Tensor]:
    """Writes q, k and v of a checkpoint folder's softmax model on pieces of a text.

    tokens: the size of each piece; the default is the model's window, because the model was not trained to attend over more
    """
    model, tokenizer = load_folder(folder)
    if model.cfg.attention != "softmax":
        raise ValueError(f"{folder}: softmax attention is needed, found {model.cfg.attention}")
    stream = torch.from_numpy(encode(tokenizer, documents(text)).astype("int64"))
    found = heads(model, windows(stream, model.cfg.sliding_window if tokens is None else tokens, cases))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, out)
    out.chmod(0o644)
    return found
