"""The decoder in PyTorch: pre-norm blocks of a mixer and SwiGLU, with the parameter names of Llama."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import MixerState
from .config import ModelConfig
from .features import draw_matrices, numbers
from .hybrid import HybridAttention
from .layers import CausalConv1d, Mlp, RMSNorm
from .rfa import RfaAttention
from .softmax import SoftmaxAttention

MIXERS = {"rfa": RfaAttention, "softmax": SoftmaxAttention, "hybrid": HybridAttention}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = MIXERS[cfg.attention](cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = Mlp(cfg)

    def forward(self, x: Tensor, state: MixerState | None, doc, starts, positions, chunk: int):
        attn, state = self.self_attn(self.input_layernorm(x), state, doc, starts, positions, chunk)
        x = x + attn.float()
        return x + self.mlp(self.post_attention_layernorm(x)).float(), state


class Decoder(nn.Module):
    """The decoder: maps token ids (batch, time) to logits (batch, time, vocab), with one `MixerState` per layer in and
    out."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.num_hidden_layers))
        self.model.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, half_life_min: float, half_life_max: float, seed: int = 0) -> None:
        """Draws normal weights, with residual outputs scaled by depth; gate half-lives are log-spaced over the heads of a
        layer.

        Everything is drawn from the seed's generators. For one seed, all mixers get the same values for the weights that
        they share, for gates, and for random matrices of the same distribution and size.
        """
        cfg, std = self.cfg, self.cfg.initializer_range
        common, gates, matrices = (numbers(seed, purpose) for purpose in ("weights", "gates", "matrices"))
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.normal_(std=std / math.sqrt(2 * cfg.num_hidden_layers), generator=common)
            elif p.ndim == 2 and name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
                p.normal_(std=std, generator=common)
        for module in self.modules():
            if isinstance(module, CausalConv1d):
                module.init_weights(common)
        life = torch.logspace(math.log10(half_life_min), math.log10(half_life_max), cfg.num_attention_heads)
        g = 0.5 ** (1.0 / life)
        for layer in self.model.layers:
            own = layer.self_attn
            if own.gate is not None:
                own.gate.weight.normal_(std=1e-3, generator=gates)
                own.gate.bias.copy_(torch.log(g / (1 - g)))
            if own.random_matrices is not None:
                own.random_matrices.copy_(draw_matrices(cfg.feature_map, tuple(own.random_matrices.shape), matrices))

    def new_state(self, batch: int, device=None) -> list[MixerState]:
        """Returns the state of `batch` empty texts."""
        device = device or self.model.norm.weight.device
        return [layer.self_attn.empty(batch, device) for layer in self.model.layers]

    def state_from(self, tuples: list[tuple]) -> list[MixerState]:
        """Rebuilds the state from each layer's `MixerState.tuple`."""
        return [layer.self_attn.State(*x) for layer, x in zip(self.model.layers, tuples, strict=True)]

    def forward(
        self,
        ids: Tensor,
        state: list[MixerState] | None,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        chunk: int = 64,
        targets: Tensor | None = None,
    ):
        """Returns the logits, or with `targets` (batch, time) the summed loss in nats, and the new states.

        If `state` is None, each row is a separate text and the new states are None.
        """
        doc = starts.long().cumsum(1) if starts is not None else None
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.model.embed_tokens(ids)
        new = []
        for layer, s in zip(self.model.layers, [None] * len(self.model.layers) if state is None else state):
            x, s = layer(x, s, doc, starts, positions, chunk)
            new.append(s)
        x = self.model.norm(x)
        head = self.model.embed_tokens.weight if self.cfg.tie_word_embeddings else self.lm_head.weight
        logits = F.linear(x, head)
        if targets is None:
            return logits.float(), None if state is None else new
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, None if state is None else new


def parameters(model: nn.Module) -> int:
    """Returns the number of trained parameters, without the fixed random matrices."""
    return sum(p.numel() for p in model.parameters())
