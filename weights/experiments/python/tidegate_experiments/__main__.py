"""The command line: `python -m tidegate_experiments prepare|compare|listops|passages|prepare-translation|translate|prepare-recipe|recipe|probe`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from tidegate_training import cli

PROG = "python -m tidegate_experiments"


def seeds(text: str) -> list[int]:
    """Parses an option such as `1,2,3`."""
    return [int(n) for n in text.split(",")]


def arguments() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog=PROG, description=__doc__.split("\n")[0])
    sub = top.add_subparsers(dest="command", required=True)

    def experiment(name: str, text: str, data: str | None, writes: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=text, description=f"{text}; finished runs are kept, killed ones resumed")
        p.add_argument("config", type=Path)
        if data:
            p.add_argument("--data", type=Path, required=True, help=f"folder that `{data}` wrote")
        p.add_argument("--out", type=Path, required=True, help=f"folder to write: {writes}, the report")
        p.add_argument("--only", type=lambda x: x.split(","), default=[], metavar="MIXER,...", help="default: those of the configuration")
        p.add_argument("--seeds", type=seeds, default=[], metavar="N,...", help="default: those of the configuration")
        cli.add_overrides(p)
        return p

    cli.add_prepare(sub, "prepare", "train the tokenizer and encode the texts of a comparison")
    p = experiment("compare", "train every mixer in one decoder on equal terms, measure and export each", "prepare", "runs, checkpoints")
    p.add_argument("--threads", type=int, default=0, help="threads of PyTorch; default: its own choice")
    p = experiment("listops", "train an encoder with each mixer on ListOps and report", None, "runs")
    p.add_argument("--device", default="cpu")
    p.set_defaults(texts=None)
    p = experiment("passages", "train an encoder with each mixer to name the book of a passage and report", None, "runs")
    p.add_argument("--texts", type=Path, default=Path("."), help="folder that the text of [data] is relative to")
    p.add_argument("--device", default="cpu")
    cli.add_prepare(sub, "prepare-translation", "train the tokenizer of sentence pairs and encode them")
    p = experiment("translate", "train an encoder-decoder with each mixer on sentence pairs and report BLEU", "prepare-translation",
                   "runs, checkpoints, hypotheses")
    p.add_argument("--threads", type=int, default=None, help="threads of PyTorch; default: train.threads")

    cli.add_prepare(sub, "prepare-recipe", "encode the texts of a recipe, for each vocabulary")
    p = experiment("recipe", "train the decoder with one change of its recipe at a time, at equal time", "prepare-recipe", "runs")
    p.add_argument("--measure", type=int, metavar="STEPS", help="instead, print what a step of each variant costs")
    text = "write the queries, keys and values of a softmax checkpoint's heads on a text, for `tidegate-experiments approximation`"
    p = sub.add_parser("probe", help=text, description=text)
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--text", type=Path, required=True)
    p.add_argument("--tokens", type=int, default=None, help="of each piece of the text; default: the model's window")
    p.add_argument("--cases", type=int, default=4, help="pieces of the text")
    p.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    return top


def recorded(argv: list[str]) -> str:
    """Returns the command as a report states it.

    Absolute paths mean nothing on other machines, so only their last part is kept.
    """
    def portable(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        return option + equals + (Path(value).name if Path(value).is_absolute() else value)

    return f"{PROG} " + shlex.join(portable(word) for word in argv)


def recorded_whole(args: argparse.Namespace) -> str:
    """Returns the command that makes all runs of a report, even if several processes made them."""
    sets = [word for item in args.set for word in ("--set", item)]
    return f"{PROG} " + shlex.join([args.command, f"configs/{args.config.name}", "--data", "DATA", "--out", "FOLDER", *sets])


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status (see `cli.status`)."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments().parse_args(argv)
    return cli.status("tidegate_experiments", lambda: execute(args, recorded(argv)))


def execute(args: argparse.Namespace, command: str) -> None:
    """Runs a command. command: its text for the report"""
    if args.command == "prepare":
        from tidegate_training.data import prepare_run

        from . import compare

        print(json.dumps(prepare_run(compare.load(args.config, args.set), args.texts, args.data)))
    elif args.command == "compare":
        from . import compare

        print(compare.compare(args.config, args.data, args.out, args.only, args.seeds, args.threads, args.set, command))
    elif args.command in ("listops", "passages"):
        from . import classify

        run = classify.load(args.command, args.config, args.set)
        classify.run_all(run, args.out, args.only, args.seeds, args.device, command, args.texts)
    elif args.command == "prepare-translation":
        from . import pairs, translate

        run = translate.load(args.config, args.set)
        print(json.dumps(pairs.prepare(run.data, args.texts, run.model.vocab_size, args.data), indent=2))
    elif args.command == "translate":
        from . import translate

        run = translate.load(args.config, args.set + ([] if args.threads is None else [f"train.threads={args.threads}"]))
        print(translate.run_all(run, args.data, args.out, args.only, args.seeds, recorded_whole(args)))
    elif args.command in ("prepare-recipe", "recipe"):
        from . import recipe

        run = recipe.load(args.config, args.set)
        if args.command == "prepare-recipe":
            recipe.prepare(run, args.texts, args.data)
        elif args.measure:
            print(json.dumps(recipe.measure(run, args.data, args.out / "measured", args.measure, args.only), indent=1))
        else:
            print(recipe.recipe(run, args.data, args.out, args.only, args.seeds, recorded_whole(args)))
    elif args.command == "probe":
        from .probe import probe

        probe(args.model, args.text, args.tokens, args.cases, args.out)


if __name__ == "__main__":
    sys.exit(main())
