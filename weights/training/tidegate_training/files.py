"""Reads files that users or earlier commands wrote; errors name the file and what is wrong with it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from tokenizers import Tokenizer


def read_text(path: str | Path) -> str:
    """Reads a UTF-8 text and converts its line ends to `\\n`; ValueError names the file and the first byte that is not
    UTF-8."""
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: must be UTF-8, found the byte 0x{content[e.start]:02x} at offset {e.start:,}") from e


def need(path: Path, command: str) -> Path:
    """Returns the path if the file exists; otherwise ValueError names `command`, which writes it."""
    if not path.is_file():
        raise ValueError(f"{path.parent}: has no {path.name}; `tidegate-train {command}` writes it")
    return path


def read_json(path: Path, command: str) -> dict:
    """Reads a JSON object that `command` wrote."""
    try:
        found = json.loads(read_text(need(path, command)))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: must be JSON ({e})") from e
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return found


def read_tokenizer(path: Path, command: str) -> Tokenizer:
    """Reads a `tokenizer.json` that `command` wrote."""
    need(path, command)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises nothing more specific
        raise ValueError(f"{path}: must be a tokenizer ({e})") from e


def read_state(path: Path, device: str) -> dict:
    """Reads a run's `state.pt`."""
    import torch  # imported here so that preparing texts does not load it

    need(path, "train")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path}: must be a state that `tidegate-train train` wrote ({str(e).splitlines()[0]})") from e
