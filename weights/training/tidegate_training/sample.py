"""Text from a decoder, one token after another: the samples of the model card."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .data import EOT_ID
from .model import Decoder

TEMPERATURE = 0.8
TOP_P = 0.95
COUNT = 3


def choose(logits: Tensor, temperature: float, top_p: float, gen: torch.Generator) -> int:
    """Draws from the smallest set of tokens whose probability reaches `top_p`. logits: (vocab)"""
    p, index = torch.softmax(logits / temperature, -1).sort(descending=True)
    p = p.masked_fill(p.cumsum(-1) - p > top_p, 0.0)
    return int(index[torch.multinomial(p, 1, generator=gen)])


@torch.no_grad()
def generate(model: Decoder, tok: Tokenizer, prompt: str, tokens: int, seed: int, temperature: float = TEMPERATURE,
             top_p: float = TOP_P) -> str:
    """The prompt and up to `tokens` more tokens, fewer if the model ends the text."""
    gen = torch.Generator().manual_seed(seed)
    model.eval()
    ids = tok.encode(prompt).ids
    state = model.new_state(1)
    feed = ids
    for at in range(tokens):
        positions = torch.arange(len(ids) - len(feed), len(ids)).unsqueeze(0)
        logits, state = model(torch.tensor([feed]), state, None, positions, chunk=min(64, len(feed)))
        token = choose(logits[0, -1], temperature, top_p, gen)
        if token == EOT_ID:
            break
        ids, feed = ids + [token], [token]
    return tok.decode(ids, skip_special_tokens=True)


def samples(model: Decoder, tok: Tokenizer, prompts: Sequence[str] = (), tokens: int = 160, seed: int = 1) -> list[tuple[str, str]]:
    """Prompts and texts, one for each prompt, not chosen among several; without prompts, `COUNT` texts from none."""
    return [(prompt, generate(model, tok, prompt, tokens, seed + i)) for i, prompt in enumerate(prompts or [""] * COUNT)]
