"""The command line: `python -m tidegate_training prepare|train|compare|export|eval|listops|translate|...`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from . import config


def seeds(text: str) -> list[int]:
    """`1,2,3` of an option."""
    return [int(n) for n in text.split(",")]


def arguments() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="tidegate-train", description=__doc__.split("\n")[0])
    sub = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return sub.add_parser(name, help=text, description=text)

    def overrides(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE",
                            help="override one setting (TOML value)")

    p = command("prepare", "train the tokenizer and encode the texts of a run")
    p.add_argument("config", type=Path)
    p.add_argument("--texts", type=Path, default=Path("."), help="folder that the files of [data] are relative to")
    p.add_argument("--data", type=Path, required=True, help="folder to write")
    overrides(p)

    p = command("train", "train, or resume where the run folder stands")
    p.add_argument("config", type=Path)
    p.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    p.add_argument("--out", type=Path, required=True, help="run folder: state, log, loss curve")
    p.add_argument("--device", default="cpu")
    overrides(p)

    p = command("compare", "train every mixer in one decoder on equal terms, measure and export each; goes on where it stood")
    p.add_argument("config", type=Path)
    p.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    p.add_argument("--out", type=Path, required=True, help="folder to write: runs, checkpoints, the report")
    p.add_argument("--only", type=lambda x: x.split(","), default=[], metavar="MIXER,...", help="these mixers")
    p.add_argument("--seeds", type=seeds, default=[], metavar="N,...", help="these seeds")
    p.add_argument("--threads", type=int, default=0, help="threads of PyTorch; default: its own choice")
    overrides(p)

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

    p = command("listops", "train an encoder with each mixer on ListOps and report; goes on where it stood")
    p.add_argument("config", type=Path)
    p.add_argument("--out", type=Path, required=True, help="folder to write: runs, the report")
    p.add_argument("--only", type=lambda x: x.split(","), default=[], metavar="MIXER,...", help="default: train.mixers")
    p.add_argument("--seeds", type=seeds, default=[], metavar="N,...",
                   help="default: train.seeds")
    p.add_argument("--device", default="cpu")
    overrides(p)

    p = command("prepare-translation", "train the tokenizer of sentence pairs and encode them")
    p.add_argument("config", type=Path)
    p.add_argument("--texts", type=Path, default=Path("."), help="folder that the files of [data] are relative to")
    p.add_argument("--data", type=Path, required=True, help="folder to write")
    overrides(p)

    p = command("translate", "train an encoder-decoder with each mixer on sentence pairs, and report BLEU; goes on where it stood")
    p.add_argument("config", type=Path)
    p.add_argument("--data", type=Path, required=True, help="folder that `prepare-translation` wrote")
    p.add_argument("--out", type=Path, required=True, help="folder to write: runs, checkpoints, hypotheses, the report")
    p.add_argument("--only", type=lambda x: x.split(","), default=[], metavar="MIXER,...", help="default: train.mixers")
    p.add_argument("--seeds", type=seeds, default=[], metavar="N,...", help="default: train.seeds")
    p.add_argument("--threads", type=int, default=None, help="threads of PyTorch; default: train.threads")
    overrides(p)

    p = command("probe", "queries, keys and values of a softmax checkpoint's heads on a text, for `tidegate-weights approximation`")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--text", type=Path, required=True)
    p.add_argument("--tokens", type=int, default=None, help="of each piece of the text; default: the model's window")
    p.add_argument("--cases", type=int, default=4, help="pieces of the text")
    p.add_argument("--out", type=Path, required=True, help="safetensors file to write")

    p = command("fixtures", "write the golden fixtures that the Rust tests read")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--of", choices=["decoders", "encoder-decoders"], default="decoders")
    return top


def asked(argv: list[str]) -> str:
    """The command as a report states it: what was asked for, and of an absolute path, which says nothing elsewhere, its name."""
    def told(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        return option + equals + (Path(value).name if Path(value).is_absolute() else value)

    return "tidegate-train " + shlex.join(told(word) for word in argv)


def told_translation(args: argparse.Namespace) -> str:
    """The command of a translation's report, which makes all of its runs: folders, and which process took which, say nothing."""
    sets = [word for item in args.set for word in ("--set", item)]
    return "tidegate-train " + shlex.join(["translate", f"configs/{args.config.name}", "--data", "DATA", "--out", "FOLDER", *sets])


def main(argv: list[str] | None = None) -> int:
    """0, 1 where a loss diverged, 2 where the command or a configuration is wrong: then one line on stderr says what."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments().parse_args(argv)
    try:
        execute(args, asked(argv))
    except (ValueError, OSError) as e:
        if isinstance(e, ValueError) and type(e) is not ValueError and not isinstance(e, (UnicodeError, json.JSONDecodeError)):
            raise  # an error of a library, not a complaint about what was given
        print(f"tidegate-train: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except RuntimeError as e:
        from .train import Diverged

        if not isinstance(e, Diverged):
            raise
        print(f"stopped: {e}", file=sys.stderr)
        return 1
    return 0


def execute(args: argparse.Namespace, command: str) -> None:
    """Does what was asked for. command: that, in words for a report"""
    if args.command == "prepare":
        from .data import prepare

        run = config.load(args.config, args.set)
        at = lambda name: str(args.texts / name)
        prepare([at(f) for f in run.data.train], run.data.repeat, {k: at(f) for k, f in run.data.valid.items()},
                run.model.vocab_size, run.train.seed, args.data, run.data.held_out)
    elif args.command == "train":
        from .train import Trainer

        print(json.dumps(Trainer(config.load(args.config, args.set), args.data, args.out, args.device).run(), indent=2))
    elif args.command == "compare":
        from .compare import compare

        print(compare(args.config, args.data, args.out, args.only, args.seeds, args.threads, args.set, command))
    elif args.command == "export":
        from .export import export_run

        export_run(args.run, args.data, args.out, args.dtype, args.name)
    elif args.command == "eval":
        from .export import evaluate_folder

        print(json.dumps(evaluate_folder(args.model, args.text, args.limit), indent=2))
    elif args.command == "listops":
        from . import classify

        classify.run_all(classify.load(args.config, args.set), args.out, args.only, args.seeds, args.device, command)
    elif args.command == "prepare-translation":
        from . import pairs, translate

        run = translate.load(args.config, args.set)
        print(json.dumps(pairs.prepare(run.data, args.texts, run.model.vocab_size, args.data), indent=2))
    elif args.command == "translate":
        from . import translate

        run = translate.load(args.config, args.set + ([] if args.threads is None else [f"train.threads={args.threads}"]))
        print(translate.run_all(run, args.data, args.out, args.only, args.seeds, told_translation(args)))
    elif args.command == "probe":
        from .probe import probe

        probe(args.model, args.text, args.tokens, args.cases, args.out)
    elif args.command == "fixtures":
        from . import fixtures, seq2seq_fixture

        (fixtures if args.of == "decoders" else seq2seq_fixture).write_all(args.out)


if __name__ == "__main__":
    sys.exit(main())
