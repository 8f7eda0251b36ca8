"""The command line: `python -m tidegate_training prepare|train|export|eval|fixtures`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import cli, config


def arguments() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="tidegate-train", description=__doc__.split("\n")[0])
    sub = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return sub.add_parser(name, help=text, description=text)

    cli.add_prepare(sub, "prepare", "train the tokenizer and encode the texts of a run")

    p = command("train", "train, or resume the run in the folder")
    p.add_argument("config", type=Path)
    p.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    p.add_argument("--out", type=Path, required=True, help="run folder: state, log, loss curve")
    p.add_argument("--device", default="cpu")
    cli.add_overrides(p)

    p = command("export", "write the checkpoint folder that Tidegate serves")
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="bf16")
    p.add_argument("--name", default=None, help="model name for the card; default: the folder's name")

    p = command("eval", "loss, perplexity and bits per byte of a checkpoint folder on a text, the state carried through")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--text", type=Path, required=True)
    p.add_argument("--limit", type=int, default=None, help="tokens")

    p = command("fixtures", "write the golden fixtures that the Rust tests read")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--of", choices=["decoders", "encoder-decoders"], default="decoders")
    return top


def main(argv: list[str] | None = None) -> int:
    """The exit status, as in `cli.status`."""
    args = arguments().parse_args(argv)
    return cli.status("tidegate-train", lambda: execute(args))


def execute(args: argparse.Namespace) -> None:
    if args.command == "prepare":
        from .data import prepare_run

        prepare_run(config.load(args.config, args.set), args.texts, args.data)
    elif args.command == "train":
        from .train import Trainer

        print(json.dumps(Trainer(config.load(args.config, args.set), args.data, args.out, args.device).run(), indent=2))
    elif args.command == "export":
        from .export import export_run

        export_run(args.run, args.data, args.out, args.dtype, args.name)
    elif args.command == "eval":
        from .export import evaluate_folder

        print(json.dumps(evaluate_folder(args.model, args.text, args.limit), indent=2))
    elif args.command == "fixtures":
        from . import fixtures, seq2seq_fixture

        (fixtures if args.of == "decoders" else seq2seq_fixture).write_all(args.out)


if __name__ == "__main__":
    sys.exit(main())
