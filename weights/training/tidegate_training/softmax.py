"""The baseline: softmax attention to the last `sliding_window` tokens, whose keys and values are the state.

The step-by-step reference is in `naive.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Attention, MixerState


def with_past(new: Tensor, past: Tensor | None, window: int) -> Tensor:
    """Concatenates the tokens before a segment and the segment's own along dimension 2.

    past: (batch, heads, window, ...), zeros if None; new: (batch, heads, time, ...) -> (batch, heads, window + time, ...)
    """
    past = new.new_zeros(*new.shape[:2], window, *new.shape[3:]) if past is None else past
    return torch.cat([past, new], dim=2)


def documents(filled: Tensor | None, doc: Tensor | None, window: int, batch: int, time: int, device) -> Tensor:
    """Returns the document of each token before and in a segment: (batch, window + time), -1 for an empty place.

    filled: (batch), the number of tokens in the past, the newest last; None for no past
    """
    place = torch.arange(window, device=device)
    filled = torch.zeros(batch, dtype=torch.long, device=device) if filled is None else filled
    past = -(place < window - filled.unsqueeze(1)).long()
    doc = torch.zeros(batch, time, dtype=torch.long, device=device) if doc is None else doc
    return torch.cat([past, doc], dim=1)


def window_scores(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, window: int, chunk: int, past: bool):
    """Returns q . k / sqrt(d) of each query and the last `window` tokens of its document, chunk by chunk, and the values.

    q: (batch, heads, time, d); k, v: (batch, heads, window + time, d); doc: (batch, window + time)
    past: whether the first `window` places may hold tokens
    -> scores (batch, heads, chunks, chunk, keys), -inf for keys that a query does not see, and the values that they weight
    (batch, heads, chunks, keys, d)
    """
    b, h, t, d = q.shape
    chunk = min(chunk, t)
    n = -(-t // chunk)
    pad = n * chunk - t
    # A single chunk without a past needs no places before it.
    back = window if past or n > 1 else 0
    q, key, value = q * d**-0.5, k[:, :, window - back :], v[:, :, window - back :]
    q_doc, k_doc = doc[:, window:], doc[:, window - back :]
    if pad:
        q, key, value = (F.pad(x, (0, 0, 0, pad)) for x in (q, key, value))
        q_doc, k_doc = F.pad(q_doc, (0, pad)), F.pad(k_doc, (0, pad))
    if n == 1:
        key, value, k_doc = key.unsqueeze(2), value.unsqueeze(2), k_doc.unsqueeze(1)
    else:
        # Each chunk reads its own tokens and the `back` before them.
        key, value = (x.unfold(2, back + chunk, chunk).transpose(-1, -2) for x in (key, value))
        k_doc = k_doc.unfold(1, back + chunk, chunk)
    scores = torch.matmul(q.reshape(b, h, n, chunk, d), key.transpose(-1, -2))
    i, j = torch.arange(chunk, device=q.device).unsqueeze(1) + back, torch.arange(back + chunk, device=q.device)
    near = (j <= i) & (j > i - window)
    reach = near & (q_doc.reshape(b, n, chunk, 1) == k_doc.unsqueeze(2))
    return scores.masked_fill_(~reach.unsqueeze(1), float("-inf")), value


def attend(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, window: int, chunk: int = 64, past: bool = True) -> Tensor:
    """Attends by softmax to the last `window` tokens of each query's document; shapes as in `window_scores` -> (batch,
    heads, time, d)"""
    b, h, t, _ = q.shape
    scores, value = window_scores(q, k, v, doc, window, chunk, past)
    return torch.matmul(scores.softmax(-1), value).reshape(b, h, -1, v.shape[-1])[:, :, :t]


@dataclass
class SoftmaxState(MixerState):
    """The keys and values of the last tokens.

    k, v: (batch, heads, sliding_window, head_dim), the newest last, zeros for empty places
    filled: (batch), int64, the number of tokens in the window
    conv: as in `RfaState`
    """

    k: Tensor
    v: Tensor
    filled: Tensor
    conv: Tensor | None = None


def keep(x: Tensor, filled: Tensor, window: int) -> Tensor:
    """Returns the last `window` places of dimension 2, with all but the newest `filled` zeroed: (batch, heads, window,
    ...)."""
    old = torch.arange(window, device=x.device) < window - filled.unsqueeze(1)
    return x[:, :, -window:].masked_fill(old.view(old.shape[0], 1, window, *[1] * (x.ndim - 3)), 0.0)


def filled_after(doc: Tensor, window: int) -> Tensor:
    """Counts the tokens of the last token's document among the last `window` places: (batch). doc: (batch, window +
    time)"""
    return (doc[:, -window:] == doc[:, -1:]).sum(1)


class SoftmaxAttention(Attention):
    """Softmax attention with a sliding window."""

    State = SoftmaxState

    def empty(self, batch: int, device) -> SoftmaxState:
        cfg = self.cfg
        zeros = lambda: torch.zeros(batch, cfg.num_attention_heads, cfg.sliding_window, cfg.head_dim, device=device)
        return SoftmaxState(zeros(), zeros(), torch.zeros(batch, dtype=torch.long, device=device),
                            self.empty_conv(batch, device))

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        window, (b, _, t, _) = self.cfg.sliding_window, q.shape
        if state is None and t <= window + chunk:
            return self.mix_block(q, k, v, doc), None
        past = (None, None, None) if state is None else (state.k, state.v, state.filled)
        doc = documents(past[2], doc, window, b, t, q.device)
        k, v = with_past(k, past[0], window), with_past(v, past[1], window)
        out = attend(q, k, v, doc, window, chunk, past=state is not None)
        if state is None:
            return out, None
        filled = filled_after(doc, window)
        return out, SoftmaxState(keep(k, filled, window), keep(v, filled, window), filled)

    def mix_block(self, q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None) -> Tensor:
        """Attends within one block of text that has no past."""
        i = torch.arange(q.shape[2], device=q.device)
        far = i.unsqueeze(1) - i
        reach = (far >= 0) & (far < self.cfg.sliding_window)
        if doc is not None:
            reach = reach & (doc.unsqueeze(-1) == doc.unsqueeze(-2)).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=reach)
