"""What the trainer's and the experiments' command lines share: options, and the conversion of errors to exit statuses."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override one setting (TOML value)")


def add_prepare(commands, name: str, text: str) -> None:
    """Adds a command that encodes the texts of a configuration. commands: the result of `add_subparsers`"""
    p = commands.add_parser(name, help=text, description=text)
    p.add_argument("config", type=Path)
    p.add_argument("--texts", type=Path, default=Path("."), help="folder that the files of [data] are relative to")
    p.add_argument("--data", type=Path, required=True, help="folder to write")
    add_overrides(p)


def status(prog: str, action: Callable[[], None]) -> int:
    """Runs `action` and returns the exit status; an error takes one line on stderr.

    0: success; 1: the run stopped because it diverged or a tensor got no gradient; 2: the command, a configuration or a
    file is wrong; 130: Ctrl-C
    """
    try:
        action()
    except (ValueError, OSError) as e:
        if isinstance(e, ValueError) and type(e) is not ValueError and not isinstance(e, (UnicodeError, json.JSONDecodeError)):
            raise  # a library's error, not a complaint about the input
        print(f"{prog}: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except RuntimeError as e:
        from .train import Diverged, Untrained  # imported here so that `--help` does not load PyTorch

        if not isinstance(e, (Diverged, Untrained)):
            raise
        print(f"stopped: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    return 0
