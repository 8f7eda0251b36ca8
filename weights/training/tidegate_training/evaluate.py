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
    """nats: mean loss per predicted token; bits_per_byte: total bits over the bytes of the text (see `stream_loss`)."""

    tokens: int
    nats: float
    perplexity: float
    bits_per_byte: float | None


@torch.no_grad()
def stream_loss(model: Decoder, stream: np.ndarray, text_bytes: int | None, limit: int | None = None, lanes: int = 1,
                segment: int = 1024, device: str = "cpu") -> Score:
    """Every token but the first is predicted, end marks too; bytes are those of the documents without marks.

    lanes > 1 splits the text into that many pieces, each from an empty state: faster, and slightly pessimistic.
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
    """total: nats over `count` of a text's `tokens` predictions, which represent that share of its bytes"""
    nats = total / count
    bpb = total / math.log(2) / (text_bytes * count / tokens) if text_bytes else None
    return Score(count, nats, math.exp(min(nats, 50.0)), bpb)
