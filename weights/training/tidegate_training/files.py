"""Reading what users and earlier commands wrote; errors name the file and what is wrong with it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from tokenizers import Tokenizer


def read_text(path: str | Path) -> str:
    """A UTF-8 text, its line ends as `\\n`; ValueError names the file and the first byte that is not UTF-8."""
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: must be UTF-8, found the byte 0x{content[e.start]:02x} at offset {e.start:,}") from e


def need(path: Path, command: str) -> Path:
    """The path, if there is a file; `command` is what writes it."""
    if not path.is_file():
        raise ValueError(f"{path.parent}: has no {path.name}; `tidegate-train {command}` writes it")
    return path


def read_json(path: Path, command: str) -> dict:
    """A JSON object that `command` wrote."""
    try:
        found = json.loads(read_text(need(path, command)))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: must be JSON ({e})") from e
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return found


def read_tokenizer(path: Path, command: str) -> Tokenizer:
    """A `tokenizer.json`."""
    need(path, command)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises nothing more specific
        raise ValueError(f"{path}: must be a tokenizer ({e})") from e


def read_state(path: Path, device: str) -> dict:
    """A run's `state.pt`."""
    import torch  # here, so that preparing texts need not load it

    need(path, "train")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path}: must be a state that `tidegate-train train` wrote ({str(e).splitlines()[0]})") from e
