"""The options of `python -m models.train`, and of a run."""

import argparse
import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

from .._program import DTYPES, Parser
from ..parallel.options import add_devices, add_processes, check_devices
from .text_data import LARGEST_VOCABULARY, SMALLEST_VOCABULARY


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options that make a run the same one: kept in its folder."""

    model: str
    steps: int
    batch: int
    layers: int
    width: int
    heads: int
    length: int | None
    vocab: int | None
    """None: of a ViT."""
    rate: float
    dtype: str
    contestants: str
    """`fused`, `plain`, or `both`."""
    save_every: int
    seed: int
    devices: int = 1
    """The number of devices that share a batch, in all processes."""
    accumulate: int = 1
    """The number of batches of a step, whose gradients are added up."""
    checksum: int | None = None
    """The checksum of a GPT's tokens; see `text_data.prepare`. None: of a run that an older version began, or of a ViT."""


_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {"steps": 1000, "batch": 8, "layers": 4, "width": 256, "heads": 4, "rate": 1e-3, "save_every": 100},
    "vit": {"steps": 500, "batch": 64, "layers": 2, "width": 64, "heads": 4, "rate": 3e-3, "save_every": 100},
}


_CHOICES = {"model": tuple(_DEFAULTS), "dtype": tuple(DTYPES), "contestants": ("fused", "plain", "both")}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line, checked. Raises `UsageError`."""
    parser = Parser(
        prog="python -m models.train",
        description="Train a transformer on the CPU, written with equinox.nn and fused by eqxcallback.",
        epilog="Each command has a --help of its own. Ctrl-C ends a training with a snapshot, and resume goes on from there.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    gpt = commands.add_parser("gpt", help="train a language model on a text")
    gpt.add_argument(
        "--text",
        type=pathlib.Path,
        metavar="FILE",
        help="UTF-8 (default: the reference of the language in this Python)",
    )
    gpt.add_argument("--vocab", type=int, default=1024, metavar="N", help="tokens of the BPE (default: %(default)s)")
    gpt.add_argument(
        "--length", type=int, default=256, metavar="N", help="tokens that the model reads (default: %(default)s)"
    )
    vit = commands.add_parser("vit", help="train a classifier of scikit-learn's digits")
    for name, command in (("gpt", gpt), ("vit", vit)):
        _add_training(command, _DEFAULTS[name])
    resume = commands.add_parser("resume", help="go on with a training")
    resume.add_argument("out", type=pathlib.Path, metavar="FOLDER", help="the run's")
    add_processes(resume.add_argument_group("several processes, which share the run's devices"))
    resume.set_defaults(devices=1)  # the run says how many
    sample = commands.add_parser("sample", help="let a language model that was trained go on with a text")
    sample.add_argument("out", type=pathlib.Path, metavar="FOLDER", help="the run's")
    sample.add_argument("text", metavar="TEXT", help="how it begins")
    sample.add_argument("--tokens", type=int, default=100, metavar="N", help="how many (default: %(default)s)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token (default: %(default)s)"
    )
    sample.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    options = parser.parse_args(arguments)
    _check(parser, options)
    return options


def run_options(options: argparse.Namespace) -> RunOptions:
    """Return the options of a run from those of `gpt` or `vit`."""
    fields = {field.name for field in dataclasses.fields(RunOptions)}
    values = {name: value for name, value in vars(options).items() if name in fields}
    values["devices"] = options.devices * options.processes
    return RunOptions(**({"length": None, "vocab": None, "model": options.command} | values))


def _add_training(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="of the run, a new one")
    size = parser.add_argument_group("size")
    size.add_argument("--layers", type=int, metavar="N", help="(default: %(default)s)")
    size.add_argument("--width", type=int, metavar="N", help="features of a row (default: %(default)s)")
    size.add_argument("--heads", type=int, metavar="N", help="of attention (default: %(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, metavar="N", help="(default: %(default)s)")
    training.add_argument("--batch", type=int, metavar="N", help="examples at a time (default: %(default)s)")
    training.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="add up the gradients of N batches in a step (default: 1)",
    )
    training.add_argument("--rate", type=float, help="the highest learning rate (default: %(default)s)")
    training.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    training.add_argument(
        "--dtype", choices=list(DTYPES), default="f32", help="of the weights; bf16 has masters in f32 (default: f32)"
    )
    training.add_argument("--save-every", type=int, metavar="N", help="steps of an interval (default: %(default)s)")
    contestants = parser.add_mutually_exclusive_group()
    contestants.add_argument(
        "--plain", dest="contestants", action="store_const", const="plain", help="train the model of equinox.nn itself"
    )
    contestants.add_argument(
        "--compare", dest="contestants", action="store_const", const="both", help="train it beside the fused model"
    )
    add_devices(parser.add_argument_group("several devices"), "each batch")
    parser.set_defaults(**defaults, contestants="fused")


class Problem(NamedTuple):
    """An option, what was expected of it, and what it is."""

    name: str
    expected: str
    got: object


def problem_of(options: RunOptions | argparse.Namespace) -> Problem | None:
    """Return what is wrong with the values of a run, or of a command line, which has some of them: None if nothing is."""
    values = {name: value for name, value in vars(options).items() if value is not None}

    def is_finite(name: str) -> bool:
        return 0 <= values.get(name, 0.0) < math.inf

    counts = ("steps", "batch", "accumulate", "layers", "width", "heads", "length", "save_every", "tokens", "devices")
    rules = {name: (values.get(name, 1) >= 1, "of 1 or more") for name in counts}
    rules["rate"] = (is_finite("rate"), "of 0 or more")
    rules["temperature"] = (is_finite("temperature"), "of 0 or more")
    rules["seed"] = (0 <= values.get("seed", 0) < 2**32, "from 0 to 2**32 - 1")
    fits = SMALLEST_VOCABULARY <= values.get("vocab", SMALLEST_VOCABULARY) <= LARGEST_VOCABULARY
    rules["vocab"] = (fits, f"from {SMALLEST_VOCABULARY}, for all bytes, to {LARGEST_VOCABULARY}")
    for name, choices in _CHOICES.items():
        rules[name] = (values.get(name, choices[0]) in choices, f"of {', '.join(choices)}")
    if values.get("model") == "gpt":
        rules |= {name: (False, "of a gpt") for name in ("length", "vocab") if name not in values}
    for name, (holds, expected) in rules.items():
        if not holds:
            return Problem(name, expected, values.get(name))
    if "heads" in values and values["width"] % values["heads"]:
        return Problem("width", "to be a multiple of --heads", f"{values['width']} and {values['heads']}")
    count = values.get("devices", 1) * values.get("processes", 1)
    if "batch" in values and values["batch"] % count:
        return Problem("batch", f"to be a multiple of the {count} devices", values["batch"])
    return None


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if hasattr(options, "processes"):
        check_devices(parser, options)
    problem = problem_of(options)
    if problem is not None:
        parser.error(f"expected --{problem.name.replace('_', '-')} {problem.expected}; got {problem.got}")
