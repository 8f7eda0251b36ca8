"""The command line: `python -m tidegate_training new|prepare|train|export|eval|fixtures`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from . import cli, config

PROG = "tidegate-train"


def arguments() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog=PROG, description="Trains models and writes the checkpoint folders that Tidegate serves.")
    sub = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return sub.add_parser(name, help=text, description=text)

    def add_about(p: argparse.ArgumentParser) -> None:
        p.add_argument("--name", default=None, help="model name for the card; default: the folder's name")
        p.add_argument("--license", action="append", default=[], metavar="ID",
                       help="of the weights, for the card, as on Hugging Face (mit); repeat it for several; default: none")
        p.add_argument("--language", action="append", default=[], metavar="ID", help="of the texts (en); default: none")
        p.add_argument("--description", default="", metavar="TEXT", help="first paragraph of the card; default: none")
        p.add_argument("--data-notes", type=Path, default=None, metavar="FILE", help="Markdown about the texts, for the card")
        p.add_argument("--prompt", action="append", default=[], metavar="TEXT",
                       help="of a sample in the card; repeat it for several; default: three samples without one")
        p.add_argument("--force", action="store_true", help="overwrite files in --out")

    p = command("new", "make a model from texts in a given time: prepare, choose a size, train, export")
    p.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="UTF-8 files with <|endoftext|> between documents")
    p.add_argument("--minutes", type=float, default=10.0, help="of all steps together, about; default: 10")
    p.add_argument("--out", type=Path, required=True, help="checkpoint folder to write; the work goes to OUT.run")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=0, help="threads of PyTorch; default: its own choice")
    add_about(p)

    cli.add_prepare(sub, "prepare", "train the tokenizer and encode the texts of a run")

    p = command("train", "train, or resume the run in the folder")
    p.add_argument("config", type=Path)
    p.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    p.add_argument("--out", type=Path, required=True, help="run folder: state, log, loss curve")
    p.add_argument("--from", type=Path, default=None, dest="start", metavar="FOLDER",
                   help="checkpoint folder whose weights the run starts from; default: random weights")
    p.add_argument("--device", default="cpu")
    cli.add_overrides(p)

    p = command("export", "write the checkpoint folder that Tidegate serves")
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    p.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="bf16")
    p.add_argument("--averaged", action="store_true", help="the average of the weights (train.ema) instead of the last ones")
    add_about(p)

    p = command("eval", "loss, perplexity and bits per byte of a checkpoint folder on a text, the state carried through")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--text", type=Path, required=True)
    p.add_argument("--limit", type=int, default=None, help="tokens")

    p = command("fixtures", "write the golden fixtures that the Rust tests read")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--of", choices=["decoders", "encoder-decoders"], default="decoders")
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status (see `cli.status`)."""
    args = arguments().parse_args(argv)
    return cli.status(PROG, lambda: execute(args))


def about(args: argparse.Namespace):
    """Collects the options that describe the model for its card."""
    from .card import About
    from .files import read_text

    if args.data_notes:
        read_text(args.data_notes)  # an unreadable file is refused before anything is computed
    return About(tuple(args.license), tuple(args.language), args.description, args.data_notes, tuple(args.prompt))


def following(command: str, *words: object) -> None:
    """Prints the next command to stderr, so that stdout stays JSON."""
    print(f"next: {PROG} {command} {shlex.join(str(w) for w in words)}", file=sys.stderr)


def run_folder(out: Path) -> Path:
    """Returns the folder; ValueError if it is not empty and holds no run."""
    if out.is_dir() and any(out.iterdir()) and not any((out / name).exists() for name in ("run.json", "state.pt")):
        raise ValueError(f"{out}: exists and holds no run; use a new or empty folder")
    return out


def execute(args: argparse.Namespace) -> None:
    if args.command == "new":
        from .new import Request, new

        print(new(Request(args.texts, args.minutes, args.out, args.device, args.threads, args.name, about(args), args.force),
                  lambda line: print(line, flush=True)))
    elif args.command == "prepare":
        from .data import prepare_run

        print(json.dumps(prepare_run(config.load(args.config, args.set), args.texts, args.data)))
        following("train", args.config, "--data", args.data, "--out", "RUN", *(word for item in args.set for word in ("--set", item)))
    elif args.command == "train":
        from .train import Trainer

        trainer = Trainer(config.load(args.config, args.set), args.data, run_folder(args.out), args.device, args.start)
        scores = trainer.run()
        if not trainer.processes.first:
            return
        print(json.dumps(scores, indent=2))
        following("export", "--run", args.out, "--data", args.data, "--out", "FOLDER")
    elif args.command == "export":
        from .export import export_run

        print(export_run(args.run, args.data, args.out, args.dtype, args.name, about(args), args.force, args.averaged))
    elif args.command == "eval":
        from .export import evaluate_folder

        print(json.dumps(evaluate_folder(args.model, args.text, args.limit), indent=2))
    elif args.command == "fixtures":
        from . import fixtures, seq2seq_fixture

        (fixtures if args.of == "decoders" else seq2seq_fixture).write_all(args.out)


if __name__ == "__main__":
    sys.exit(main())
