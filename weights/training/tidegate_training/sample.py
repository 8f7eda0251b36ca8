"""Generates text from a decoder, one token after another, for the samples of the model card."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .data import EOT_ID
from .model import Decoder

TEMPERATURE = 0.7
MIN_P = 0.02
REPETITION_PENALTY = 1.2
COUNT = 3


def choose(logits: Tensor, seen: Sequence[int], gen: torch.Generator, temperature: float = TEMPERATURE, min_p: float = MIN_P,
           repetition_penalty: float = REPETITION_PENALTY) -> int:
    """Draws a token as the server does. logits: (vocab)

    seen: the tokens of the text so far; `repetition_penalty` divides their logits above zero and multiplies those below
    min_p: tokens with less than this share of the most likely token's probability are left out
    """
    index = torch.tensor(sorted(set(seen)), dtype=torch.long)
    old = logits[index]
    logits = logits.index_copy(0, index, torch.where(old > 0, old / repetition_penalty, old * repetition_penalty))
    p = torch.softmax(logits / temperature, -1)
    return int(torch.multinomial(p.masked_fill(p < min_p * p.max(), 0.0), 1, generator=gen))


@torch.no_grad()
def generate(model: Decoder, tok: Tokenizer, prompt: str, tokens: int, seed: int) -> str:
    """Returns the prompt and up to `tokens` more tokens, fewer if the model ends the text."""
    gen = torch.Generator().manual_seed(seed)
    model.eval()
    ids = tok.encode(prompt).ids
    state = model.new_state(1)
    feed = ids
    for at in range(tokens):
        positions = torch.arange(len(ids) - len(feed), len(ids)).unsqueeze(0)
        logits, state = model(torch.tensor([feed]), state, None, positions, chunk=min(64, len(feed)))
        token = choose(logits[0, -1], ids, gen)
        if token == EOT_ID:
            break
        ids, feed = ids + [token], [token]
    return tok.decode(ids, skip_special_tokens=True)


def samples(model: Decoder, tok: Tokenizer, prompts: Sequence[str] = (), tokens: int = 160, seed: int = 1) -> list[tuple[str, str]]:
    """Returns pairs of prompt and text, one for each prompt and without selection; without prompts, `COUNT` texts from an
    empty prompt."""
    return [(prompt, generate(model, tok, prompt, tokens, seed + i)) for i, prompt in enumerate(prompts or [""] * COUNT)]
