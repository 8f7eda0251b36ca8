"""The encoder-decoder in PyTorch: a softmax encoder, and decoder blocks that also attend to its output.

As in Peng et al. 2021, RFA replaces the decoder's causal and cross attention; the encoder stays softmax. The softmax model
that RFA is compared with differs only in those two. For each source, a decoder block keeps the result of
`CrossAttention.read`: for RFA the sums S, z and c, whose size does not depend on the source. `Seq2Seq.decode` reads one
token or many, for decoding and for teacher forcing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import features
from .attention import MixerState
from .config import MAX_VECTORS, ModelConfig
from .encoder import EncoderBlock
from .features import draw_matrices, numbers
from .layers import CausalConv1d, RMSNorm, rotary_angles
from .model import Block
from .rfa import normalise

IGNORED = -100  # the label of padding


@dataclass(frozen=True)
class Seq2SeqConfig(ModelConfig):
    """The settings of an encoder-decoder: a decoder's keys and those of the source; written as `config.json` with
    model_type `rfa_seq2seq`.

    max_source_positions: the maximum number of tokens in a source, including the tokenizer's first one
    decoder_start_token_id: the token from which the first target token is predicted
    cross_proj_dim: the number of random vectors per head in attention to the source; None for `proj_dim`
    """

    encoder_layers: int = 4
    max_source_positions: int = 128
    decoder_start_token_id: int = 0
    cross_proj_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, allowed, bound in (
            ("attention", self.attention in ("rfa", "softmax"), "rfa or softmax in an encoder-decoder"),
            ("feature_map", self.feature_map != "favor", "gaussian, arc_cosine or elu in an encoder-decoder"),
            ("output_norm", not self.output_norm, "false in an encoder-decoder"),
            ("head_dim", self.head_dim % 2 == 0, "even for the encoder's rotary positions"),
            ("encoder_layers", 1 <= self.encoder_layers <= 1024, "1 to 1024"),
            ("max_source_positions", 1 <= self.max_source_positions <= 65536, "1 to 65536"),
            ("decoder_start_token_id", 0 <= self.decoder_start_token_id < self.vocab_size, "below vocab_size"),
            ("cross_proj_dim", self.cross_proj_dim is None or self.proj_dim > 0, "absent without random vectors"),
            ("cross_proj_dim", self.cross_proj_dim is None or 1 <= self.cross_proj_dim <= MAX_VECTORS, f"1 to {MAX_VECTORS}"),
        ):
            if not allowed:
                raise ValueError(f"model.{key}: must be {bound}, found {getattr(self, key)!r}")

    @property
    def of_cross_attention(self) -> Seq2SeqConfig:
        """The settings that attention to the source takes its features from."""
        return dataclasses.replace(self, proj_dim=self.cross_proj_dim or self.proj_dim)

    @property
    def cross_numbers(self) -> int:
        """The number of values in all layers' states of a source; softmax counts the longest source, RFA's size is the same
        for all."""
        d = self.head_dim
        head = self.of_cross_attention.features * (d + 1) + 1 if self.attention == "rfa" else self.max_source_positions * 2 * d
        return self.num_hidden_layers * self.num_attention_heads * head

    @property
    def state_numbers(self) -> int:
        """The number of values in a decoder's state, plus the states of the source and its number of tokens."""
        return super().state_numbers + self.cross_numbers + 1


@dataclass
class CrossSums:
    """RFA's state of a source: s (batch, heads, features, head_dim + 1), the last column is z; c (batch), its number of
    tokens."""

    s: Tensor
    c: Tensor


@dataclass
class CrossKeys:
    """Softmax's state of a source: k, v (batch, heads, source, head_dim); mask: bool (batch, source), or None without
    padding."""

    k: Tensor
    v: Tensor
    mask: Tensor | None


class CrossAttention(nn.Module):
    """Attention from the target to the source, without positions and gates: over sums (RFA) or over keys (softmax)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        h, d = cfg.num_attention_heads, cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, h * d, bias=False)
        self.o_proj = nn.Linear(h * d, cfg.hidden_size, bias=False)
        self.register_parameter("sigma", None)
        self.register_buffer("random_matrices", None)
        if cfg.has_sigma:
            self.sigma = nn.Parameter(torch.ones(h, d))
            self.random_matrices = draw_matrices(cfg.feature_map, (h, cfg.proj_dim, d))
        # Whether to use the kernel itself, which gaussian features estimate; only in training.
        self.exact = False

    def heads(self, y: Tensor) -> Tensor:
        """(batch, time, heads * head_dim) -> (batch, heads, time, head_dim), in at least f32"""
        y = y if y.dtype == torch.float64 else y.float()
        return y.view(*y.shape[:2], self.cfg.num_attention_heads, self.cfg.head_dim).transpose(1, 2)

    def phi(self, x: Tensor) -> Tensor:
        """(batch, heads, time, head_dim) -> (batch, heads, time, features)"""
        w = self.random_matrices * self.sigma[:, None, :] if self.cfg.has_sigma else None
        return features.features_of(self.cfg.feature_map, x, w)

    def exactly(self, q: Tensor, kept: CrossKeys) -> Tensor:
        """Attends with weights proportional to exp(-|sigma (q - k)|^2 / 2), for q and k of unit length. There is no floor of
        the denominator.

        q: (batch, heads, time, head_dim), as projected; kept: its keys have unit length, times sigma -> same shape as q
        """
        bias = kept.k.square().sum(-1).unsqueeze(-2) / -2
        if kept.mask is not None:
            bias = bias.masked_fill(~kept.mask[:, None, None, :], float("-inf"))
        q = features.unit(q) * self.sigma[:, None, :]
        return F.scaled_dot_product_attention(q, kept.k, kept.v, attn_mask=bias, scale=1.0)

    def read(self, memory: Tensor, mask: Tensor | None) -> CrossSums | CrossKeys:
        """Computes the state of a source. memory: (batch, source, hidden); mask: bool (batch, source), false for padding"""
        k, v = self.heads(self.k_proj(memory)), self.heads(self.v_proj(memory))
        if self.cfg.attention == "softmax":
            return CrossKeys(k, v, mask)
        if self.exact:
            if self.cfg.feature_map != "gaussian":
                raise ValueError(f"exact: {self.cfg.feature_map} features do not estimate the Gaussian kernel")
            return CrossKeys(features.unit(k) * self.sigma[:, None, :], v, mask)
        phi_k = self.phi(k)
        if mask is None:
            c = torch.full_like(k[:, 0, 0, 0], k.shape[2])
        else:
            phi_k = phi_k * mask[:, None, :, None]
            c = mask.sum(1).to(k.dtype)
        return CrossSums(torch.matmul(phi_k.transpose(-1, -2), torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)), c)

    def forward(self, x: Tensor, kept: CrossSums | CrossKeys) -> Tensor:
        """x: (batch, time, hidden); kept: the state of the source -> same shape as x"""
        q = self.heads(self.q_proj(x))
        if self.exact:
            out = self.exactly(q, kept)
        elif isinstance(kept, CrossKeys):
            mask = None if kept.mask is None else kept.mask[:, None, None, :]
            out = F.scaled_dot_product_attention(q, kept.k, kept.v, attn_mask=mask)
        else:
            out = torch.matmul(self.phi(q), kept.s)
            out = normalise(out[..., :-1], out[..., -1], kept.c[:, None, None], self.cfg.denominator_floor)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SourceBlock(EncoderBlock):
    """An `EncoderBlock` with dropout on the output of each residual branch."""

    def __init__(self, cfg: Seq2SeqConfig, dropout: float):
        super().__init__(cfg)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), mask, angles))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class TargetBlock(Block):
    """A `Block` with cross attention between self attention and SwiGLU, and dropout on the output of each residual
    branch."""

    def __init__(self, cfg: Seq2SeqConfig, dropout: float):
        super().__init__(cfg)
        self.cross_attn_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.cross_attn = CrossAttention(cfg.of_cross_attention)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, own: MixerState | None, kept: CrossSums | CrossKeys, positions: Tensor):
        """x: (batch, time, hidden); own: the state of the self attention -> same shape as x, and the new state"""
        attn, own = self.self_attn(self.input_layernorm(x), own, None, None, positions, min(64, x.shape[1]))
        x = x + self.dropout(attn)
        x = x + self.dropout(self.cross_attn(self.cross_attn_layernorm(x), kept))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x))), own


@dataclass
class Translation:
    """The state of a translation in progress.

    own, cross: each layer's states of the target and of the source; `own` is None if the target is read in one piece
    tokens: the number of target tokens so far
    """

    own: list[MixerState] | None
    cross: list[CrossSums | CrossKeys]
    tokens: int = 0


class Seq2Seq(nn.Module):
    """The encoder-decoder: maps source ids (batch, source) and target ids (batch, time) to logits (batch, time, vocab)."""

    def __init__(self, cfg: Seq2SeqConfig, dropout: float = 0.0):
        super().__init__()
        self.cfg = cfg
        self.dropout = nn.Dropout(dropout)
        self.model, self.encoder = nn.Module(), nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.encoder.layers = nn.ModuleList(SourceBlock(cfg, dropout) for _ in range(cfg.encoder_layers))
        self.encoder.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.model.layers = nn.ModuleList(TargetBlock(cfg, dropout) for _ in range(cfg.num_hidden_layers))
        self.model.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, half_life_min: float, half_life_max: float, seed: int = 0) -> None:
        """Initializes the weights as `Decoder.init_weights` does: for one seed, RFA and softmax models share their common
        weights."""
        cfg, std = self.cfg, self.cfg.initializer_range
        purposes = ("weights", "gates", "matrices", "convolutions")
        common, gates, matrices, convolutions = (numbers(seed, purpose) for purpose in purposes)
        branches = {"encoder": 2 * cfg.encoder_layers, "model": 3 * cfg.num_hidden_layers}
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.normal_(std=std / math.sqrt(branches[name.split(".")[0]]), generator=common)
            elif p.ndim == 2 and name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
                p.normal_(std=std, generator=common)
        life = torch.logspace(math.log10(half_life_min), math.log10(half_life_max), cfg.num_attention_heads)
        g = 0.5 ** (1.0 / life)
        for layer in self.model.layers:
            if layer.self_attn.gate is not None:
                layer.self_attn.gate.weight.normal_(std=1e-3, generator=gates)
                layer.self_attn.gate.bias.copy_(torch.log(g / (1 - g)))
            for conv in (m for m in layer.self_attn.modules() if isinstance(m, CausalConv1d)):
                conv.init_weights(convolutions)
            for attn in (layer.self_attn, layer.cross_attn):
                if attn.random_matrices is not None:
                    attn.random_matrices.copy_(draw_matrices(cfg.feature_map, tuple(attn.random_matrices.shape), matrices))

    def encode(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encodes a source; returns the memory (batch, source, hidden).

        ids: (batch, source); mask: bool (batch, source), false for padding; None without padding
        """
        cfg = self.cfg
        angles = rotary_angles(torch.arange(ids.shape[1], device=ids.device)[None], cfg.head_dim, cfg.rope_theta)
        x = self.dropout(self.model.embed_tokens(ids))
        for layer in self.encoder.layers:
            x = layer(x, mask, angles)
        return self.encoder.norm(x)

    def read(self, ids: Tensor, mask: Tensor | None = None) -> list[CrossSums | CrossKeys]:
        """Returns what every decoder layer keeps of a source; arguments as in `encode`."""
        memory = self.encode(ids, mask)
        return [layer.cross_attn.read(memory, mask) for layer in self.model.layers]

    def begin(self, ids: Tensor, mask: Tensor | None = None) -> Translation:
        """Returns the state before the first target token; arguments as in `encode`."""
        own = [layer.self_attn.empty(ids.shape[0], ids.device) for layer in self.model.layers]
        return Translation(own, self.read(ids, mask))

    def decode(self, ids: Tensor, state: Translation) -> tuple[Tensor, Translation]:
        """Reads the next target tokens, ids (batch, time); returns the logits after each token (batch, time, vocab), and
        the new state."""
        positions = (state.tokens + torch.arange(ids.shape[1], device=ids.device)).expand_as(ids)
        x = self.dropout(self.model.embed_tokens(ids))
        own = []
        for i, layer in enumerate(self.model.layers):
            x, s = layer(x, None if state.own is None else state.own[i], state.cross[i], positions)
            own.append(s)
        x = self.model.norm(x)
        head = self.model.embed_tokens.weight if self.cfg.tie_word_embeddings else self.lm_head.weight
        return F.linear(x, head), Translation(None if state.own is None else own, state.cross, state.tokens + ids.shape[1])

    def forward(self, source: Tensor, mask: Tensor | None, target: Tensor, labels: Tensor | None = None,
                smoothing: float = 0.0) -> Tensor:
        """Runs the model with teacher forcing; returns the logits, or with `labels` the summed loss in nats.

        labels: (batch, time), `IGNORED` for padding. The padding of a target is at its end, where no real token attends to
        it.
        """
        logits, _ = self.decode(target, Translation(None, self.read(source, mask)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum",
                               label_smoothing=smoothing)

    @torch.no_grad()
    def greedy(self, source: Tensor, mask: Tensor | None, limit: int, end: int) -> list[list[int]]:
        """Decodes greedily until `end` or for `limit` tokens; returns the ids for each source, without `end`."""
        state = self.begin(source, mask)
        ids = torch.full((source.shape[0], 1), self.cfg.decoder_start_token_id, device=source.device)
        written = []
        ended = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)
        while len(written) < limit and not ended.all():
            logits, state = self.decode(ids, state)
            ids = logits[:, -1:].argmax(-1)
            ended |= ids[:, 0] == end
            written.append(ids[:, 0])
        rows = torch.stack(written, dim=1).tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]
