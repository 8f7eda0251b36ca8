"""Validation: the loss of a stream, with the state carried through it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from .data import EOT_ID, positions
from .model import Decoder


@dataclass(frozen=True)
class Score:
    """A model's score on a text.

    nats: the mean loss per predicted token; bits_per_byte: the total bits divided by the bytes of the text (see
    `stream_loss`)
    """

    tokens: int
    nats: float
    perplexity: float
    bits_per_byte: float | None


@torch.no_grad()
def stream_loss(model: Decoder, stream: np.ndarray, text_bytes: int | None, limit: int | None = None, lanes: int = 1,
                segment: int = 1024, device: str = "cpu") -> Score:
    """Scores a model on a stream. Every token but the first is predicted, including end marks.

    text_bytes: the bytes of the documents, without marks; limit: the maximum number of tokens to predict; None for all
    lanes > 1 splits the text into that many pieces, each read from an empty state, which is faster and slightly
    pessimistic.
    """
    model.eval()
    size = min(stream.size, (limit or stream.size) + 1)
    length = (size - 1) // lanes
    rows = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(lanes)]).astype(np.int64)
    state = model.new_state(lanes, device)
    total = 0.0
    before = np.zeros(lanes, dtype=np.int64)
    for at in range(0, length, segment):
        piece = rows[:, at : at + segment + 1]
        place = positions(piece[:, :-1] == EOT_ID, before)
        before = place[:, -1] + 1
        piece, place = torch.from_numpy(piece).to(device), torch.from_numpy(place).to(device)
        ids, targets = piece[:, :-1], piece[:, 1:]
        loss, state = model(ids, state, ids == EOT_ID, place, targets=targets)
        total += loss.item()
    model.train()
    return score(total, length * lanes, stream.size - 1, text_bytes)


def score(total: float, count: int, tokens: int, text_bytes: int | None) -> Score:
    """Returns the `Score` of a part of a text. total: the nats of `count` of the text's `tokens` predictions, which stand
    for the same share of its bytes"""
    nats = total / count
    bpb = total / math.log(2) / (text_bytes * count / tokens) if text_bytes else None
    return Score(count, nats, math.exp(min(nats, 50.0)), bpb)
