"""Writes the checkpoint folder that Tidegate serves from a run, reads it back, and evaluates it on a text.

The folder holds `config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`,
and the model card that `card.py` writes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import card, config, sample
from .config import ModelConfig, RunConfig
from .data import EOT, EOT_ID, documents, encode
from .evaluate import stream_loss
from .files import need, read_json, read_state, read_tokenizer
from .model import Decoder, parameters
from .seq2seq import Seq2Seq, Seq2SeqConfig

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Small tensors that are the most sensitive to rounding: they set a gate's half-life, the weight of far tokens, and the
# arguments of sine and cosine.
KEPT_F32 = ("gate.bias", "sigma", "far_bias", "random_matrices")
# Keys of config.json that `ModelConfig` does not have; model_type names the kind of model.
FIXED = {"model_type": "rfa_gate", "architectures": ["RfaGateForCausalLM"], "hidden_act": "silu",
         "bos_token_id": EOT_ID, "eos_token_id": EOT_ID}
FIXED_SEQ2SEQ = FIXED | {"model_type": "rfa_seq2seq", "architectures": ["RfaSeq2SeqForConditionalGeneration"]}
GENERATION = {"bos_token_id": EOT_ID, "eos_token_id": EOT_ID, "do_sample": True, "temperature": sample.TEMPERATURE,
              "min_p": sample.MIN_P, "repetition_penalty": sample.REPETITION_PENALTY}
# Greedy decoding, with which BLEU is measured.
GENERATION_SEQ2SEQ = {"bos_token_id": EOT_ID, "eos_token_id": EOT_ID, "do_sample": False, "temperature": 0.0}
# A story model has no chat roles: each message of a chat is a paragraph, and the answer is the next paragraph.
CHAT_TEMPLATE = ("{% for message in messages %}{{ message['content'] | trim }}"
                 "{% if not loop.last or add_generation_prompt %}{{ '\\n\\n' }}{% endif %}{% endfor %}")


def fixed_keys(cfg: ModelConfig) -> dict:
    """Returns the keys of `config.json` that have the same value in all models of a kind."""
    return FIXED_SEQ2SEQ if isinstance(cfg, Seq2SeqConfig) else FIXED


def config_json(cfg: ModelConfig, dtype: str) -> dict:
    """Returns the contents of `config.json`: exactly the keys that `tidegate-model` accepts."""
    keys = {key: value for key, value in dataclasses.asdict(cfg).items() if value is not None}
    fixed = fixed_keys(cfg)
    del keys["initializer_range"]  # only for training
    for key in ("feature_map", "gate", "proj_dim", "denominator_eps") if cfg.attention == "softmax" else ():
        del keys[key]  # unused by softmax
    out = {k: fixed[k] for k in ("model_type", "architectures")}
    for key, value in keys.items():
        out[key] = value
        if key == "head_dim":
            out["hidden_act"] = fixed["hidden_act"]
    out |= {k: fixed[k] for k in ("bos_token_id", "eos_token_id")}
    return out | {"torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}


def tensors(model: Decoder | Seq2Seq, dtype: str) -> dict[str, Tensor]:
    """Returns the state dict in `dtype`, except for the tensors of `KEPT_F32`."""
    to = lambda name: torch.float32 if name.endswith(KEPT_F32) else DTYPES[dtype]
    return {k: v.detach().cpu().to(to(k)).contiguous() for k, v in model.state_dict().items()}


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_model(model: Decoder | Seq2Seq, out: Path, dtype: str) -> None:
    """Writes `config.json` and `model.safetensors`, which the model crate reads."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {sorted(DTYPES)}, found {dtype!r}")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config_json(model.cfg, dtype))
    save_file(tensors(model, dtype), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library makes it readable only by its owner


def write_folder(model: Decoder | Seq2Seq, tokenizer: Path, out: Path, dtype: str) -> None:
    """Writes a checkpoint folder without its card."""
    write_model(model, out, dtype)
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    translates = isinstance(model.cfg, Seq2SeqConfig)
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOT, "eos_token": EOT, "unk_token": EOT,
        # A decoder's text may have any length; the source of a translation is limited by its positions.
        "model_max_length": model.cfg.max_source_positions if translates else 10**30, "clean_up_tokenization_spaces": False,
        # A translation model has no chat template.
    } | ({} if translates else {"chat_template": CHAT_TEMPLATE}))
    write_json(out / "generation_config.json", GENERATION_SEQ2SEQ if translates else GENERATION)


@dataclasses.dataclass(frozen=True)
class Written:
    """What an export wrote: the folder, its files with their sizes in bytes, and the model's parameters."""

    out: Path
    files: dict[str, int]
    parameters: int
    dtype: str

    def __str__(self) -> str:
        """Returns a table of the files, and the commands that serve the folder."""
        rows = "\n".join(f"  {name:<24}{size:>14,} bytes" for name, size in self.files.items())
        path = shlex.quote(str(self.out))
        return f"""{self.out}: {self.parameters:,} parameters in {self.dtype}
{rows}
serve it:  tidegate --model {path}
from a clone:  cargo run --release -p tidegate-server -- --model {shlex.quote(str(self.out.resolve()))}"""


def check_free(out: Path, force: bool) -> None:
    """Raises ValueError if `out` is a file, or if it is a folder with files and `force` is false."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; name a new or empty folder")
    if out.exists() and any(out.iterdir()) and not force:
        raise ValueError(f"{out}: exists and is not empty; name another folder, or overwrite it with --force")


def export_run(run: Path, data: Path, out: Path, dtype: str, name: str | None = None, about: card.About = card.About(),
               force: bool = False, averaged: bool = False) -> Written:
    """Writes the checkpoint folder of a run: its last saved weights, the tokenizer of `data`, and the card.

    The files are written to a temporary folder beside `out` and then moved, so a failure leaves nothing behind.
    force: whether existing files may be overwritten
    averaged: whether to export the moving average of the weights (`train.ema`) instead of the last weights
    """
    check_free(out, force)
    blob, recipe = read_state(run / "state.pt", "cpu"), read_json(run / "run.json", "train")
    if ModelConfig(**recipe["model"]) != ModelConfig(**blob["config"]["model"]):
        raise ValueError(f"{run}: run.json and state.pt describe different models")
    cfg = RunConfig(*(config.build(cls, recipe[key], key)
                      for key, cls in (("model", ModelConfig), ("train", config.TrainConfig), ("data", config.DataConfig))))
    found = read_tokenizer(data / "tokenizer.json", "prepare").get_vocab_size()
    if found != cfg.model.vocab_size:
        raise ValueError(f"{data}: has a tokenizer of {found:,} tokens, and the model of {run} has {cfg.model.vocab_size:,}")
    model = Decoder(cfg.model)
    if averaged and not blob.get("average"):
        raise ValueError(f"--averaged: {run} has no average of its weights; train with train.ema")
    model.load_state_dict(blob["average" if averaged else "model"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as place:
        part = Path(place) / "part"
        write_folder(model, data / "tokenizer.json", part, dtype)
        # The samples come from the exported weights, rounded to `dtype`.
        shipped, tok = load_folder(part)
        drawn = sample.samples(shipped, tok, about.prompts)
        text = card.write(name or out.resolve().name, cfg, blob["step"], run / "log.jsonl", dtype, drawn, about, recipe.get("from"),
                          averaged)
        (part / "README.md").write_text(text, encoding="utf-8")
        files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        out.mkdir(exist_ok=True)
        for file in files:
            os.replace(part / file, out / file)
    return Written(out, files, parameters(model), dtype)


def load_folder(path: Path) -> tuple[Decoder | Seq2Seq, Tokenizer]:
    """Reads a checkpoint folder; the weights are converted to f32."""
    path = Path(path)
    keys = read_json(path / "config.json", "export")
    translates = keys.get("model_type") == FIXED_SEQ2SEQ["model_type"]
    for key, value in (FIXED_SEQ2SEQ if translates else FIXED).items():
        if keys.pop(key, value) != value:
            raise ValueError(f"{path / 'config.json'}: {key} must be {value!r}")
    keys.pop("torch_dtype", None)
    kind, cls = (Seq2Seq, Seq2SeqConfig) if translates else (Decoder, ModelConfig)
    model = kind(config.build(cls, keys, "config.json"))
    weights = need(path / "model.safetensors", "export")
    try:
        model.load_state_dict({k: v.float() for k, v in load_file(weights).items()})
    except (RuntimeError, SafetensorError) as e:
        raise ValueError(f"{weights}: must have the weights that config.json describes ({' '.join(str(e).split())[:200]})") from e
    return model.eval(), read_tokenizer(path / "tokenizer.json", "export")


def evaluate_folder(model: Path, text: Path, limit: int | None = None) -> dict:
    """Scores a checkpoint folder on a text file, with the state carried through the whole text.

    limit: how many tokens to predict, from the start; `bytes` is then their share of the text's bytes
    """
    docs = documents(text)
    if not docs:
        raise ValueError(f"{text}: holds no text")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: must be at least 1, found {limit}")
    decoder, tok = load_folder(model)
    if isinstance(decoder, Seq2Seq):
        raise ValueError(f"{model}: must be a decoder's folder, found an encoder-decoder's")
    stream = encode(tok, docs)
    size = sum(len(d.encode()) for d in docs)
    score = stream_loss(decoder, stream, size, limit)
    share = score.tokens / (stream.size - 1)
    return {"tokens": score.tokens, "bytes": round(size * share), "nats": score.nats, "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte}
