"""RFA-Gate with one change each, for `recipe`. The trainer cannot export these mixers, and the server cannot read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidegate_training.config import ModelConfig
from tidegate_training.features import features_of
from tidegate_training.model import Decoder
from tidegate_training.rfa import RfaAttention, RfaState, chunked


class ValueResidual(RfaAttention):
    """v + share * (v of the first layer - v), with a learned share per head that begins at 1/2 (Zhou et al., 2024)."""

    # The v of the first layer, which sets it; all layers of a model share this dictionary.
    first: dict[str, Tensor]

    def add_tensors(self, cfg: ModelConfig) -> None:
        super().add_tensors(cfg)
        self.share = nn.Parameter(torch.full((cfg.num_attention_heads,), 0.5))

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        if self.share is None:
            self.first["v"] = v
        else:
            v = v + self.share[:, None, None] * (self.first["v"] - v)
        return super().mix(q, k, v, a, state, starts, doc, chunk)


class Reading(RfaAttention):
    """A mixer that also reads the layer's input: (batch, time, hidden)."""

    def forward(self, x, state, doc, starts, positions, chunk):
        self.input = x.float()
        return super().forward(x, state, doc, starts, positions, chunk)


class OutputGate(Reading):
    """h * silu(W x) before `o_proj`, as in RetNet and GLA."""

    def add_tensors(self, cfg: ModelConfig) -> None:
        super().add_tensors(cfg)
        self.output_gate_proj = nn.Linear(cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim, bias=False)

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        out, state = super().mix(q, k, v, a, state, starts, doc, chunk)
        gate = F.silu(self.output_gate_proj(self.input)).unflatten(-1, (self.cfg.num_attention_heads, -1))
        return out * gate.transpose(1, 2), state


class OutputGatePerHead(Reading):
    """h * 2 sigmoid(w x) before `o_proj`, one number per head that begins at 1."""

    def add_tensors(self, cfg: ModelConfig) -> None:
        super().add_tensors(cfg)
        self.output_gate = nn.Parameter(torch.zeros(cfg.num_attention_heads, cfg.hidden_size))

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        out, state = super().mix(q, k, v, a, state, starts, doc, chunk)
        gate = 2 * torch.sigmoid(F.linear(self.input, self.output_gate))
        return out * gate.transpose(1, 2).unsqueeze(-1), state


class InputGate(Reading):
    """S <- g S + i phi(k) v^T with a separate input gate i that begins at 1 - g. The floor of the denominators still
    weights keys by 1 - g."""

    def add_tensors(self, cfg: ModelConfig) -> None:
        super().add_tensors(cfg)
        self.input_gate = nn.Parameter(torch.zeros(cfg.num_attention_heads, cfg.hidden_size))
        self.input_bias = nn.Parameter(torch.zeros(cfg.num_attention_heads))

    def mix(self, q, k, v, a, state, starts, doc, chunk):
        w = self.matrices()
        phi_q, phi_k = (features_of(self.cfg.feature_map, x, w) for x in (q, k))
        i = F.linear(self.input, self.input_gate, self.input_bias).transpose(1, 2) - a
        # `chunked` multiplies by 1 - g = sigmoid(-a).
        phi_k = phi_k * (F.logsigmoid(i) - F.logsigmoid(-a)).exp().unsqueeze(-1)
        sums = None if state is None else (state.s, state.c)
        out, sums = chunked(phi_q, phi_k, v, a, sums, self.cfg.denominator_floor, chunk, starts, products=self.products)
        return out, None if sums is None else RfaState(*sums)


MIXERS: dict[str, type[RfaAttention]] = {
    "rfa": RfaAttention,
    "value-residual": ValueResidual,
    "output-gate": OutputGate,
    "output-gate-per-head": OutputGatePerHead,
    "input-gate": InputGate,
}


class RecipeDecoder(Decoder):
    """The decoder with one of `MIXERS`."""

    def __init__(self, cfg: ModelConfig, mixer: str):
        super().__init__(cfg)
        for layer in self.model.layers if mixer != "rfa" else ():
            layer.self_attn = MIXERS[mixer](cfg)
        if mixer == "value-residual":
            first: dict[str, Tensor] = {}
            for layer in self.model.layers:
                layer.self_attn.first = first
            self.model.layers[0].self_attn.share = None
