"""The options of `python -m models.generate`."""

import argparse
import pathlib

from .._program import Parser, add_rounding, add_weights
from ..decoding.sampling import PENALTIES, TEMPERATURES, Sampling
from ..parallel.options import add_devices, check_devices


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, checked. Raises `UsageError`."""
    parser = Parser(prog="python -m models.generate", description="Answer a prompt with a language model on the CPU.")
    parser.add_argument("prompt", nargs="?", help="what the user says")
    parser.add_argument("--chat", action="store_true", help="answer the lines of stdin, with the conversation in mind")
    parser.add_argument(
        "--prompts", type=pathlib.Path, metavar="FILE", help="answer each line, or each object of a .jsonl"
    )
    parser.add_argument(
        "--prompt-file", type=pathlib.Path, metavar="FILE", help="a prompt of several lines; - is stdin"
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", help="answers of --prompts that are made at a time (default: 8)"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="room for a conversation (default: 2048)")
    answer = parser.add_argument_group("answers")
    answer.add_argument("--system", help="the system message (default: the model's own)")
    answer.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    answer.add_argument(
        "--stop", action="append", default=[], metavar="STRING", help="end an answer before this text; may be repeated"
    )
    answer.add_argument(
        "--lookup", action="store_true", help="read guesses of the next tokens, from where the last ones stood before"
    )
    answer.add_argument("--json", action="store_true", help="print a JSON object in place of an answer's text")
    answer.add_argument("--profile", action="store_true", help="after the answer, say where the time of a token goes")
    _add_sampling(parser.add_argument_group("sampling"))
    model = parser.add_argument_group("model")
    add_weights(model)
    model.add_argument(
        "--adapter", type=pathlib.Path, metavar="FOLDER", help="what models.finetune or PEFT has trained for it (LoRA)"
    )
    add_rounding(model)
    devices = parser.add_argument_group("several devices")
    add_devices(devices, "the model")
    devices.add_argument(
        "--split",
        choices=["model", "sequence"],
        help="what they share: the model (default), or the prompt and the answer",
    )
    options = parser.parse_args(arguments)
    _check(parser, options)
    check_devices(parser, options)
    _check_one_device(parser, options)
    return options


def sampling_of(options: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, help="0 takes the most likely token (default); above it, draw one")
    group.add_argument(
        "--top-k", type=int, help="draw from so many of the most likely tokens (default: 0, which is all)"
    )
    group.add_argument("--top-p", type=float, help="draw from the most likely tokens of this much probability")
    group.add_argument(
        "--min-p", type=float, help="draw from tokens with this much of the most likely one's probability"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="make tokens less likely that were there before (1: off)"
    )
    group.add_argument("--seed", type=int, help="of the draws (default: 0)")


def _fill_sampling(options: argparse.Namespace) -> str:
    """Put the defaults in, and return the options that were given for draws, where no temperature was given."""
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    given = [name for name in defaults if getattr(options, name) is not None]
    for name in defaults.keys() - given:
        setattr(options, name, defaults[name])
    if options.temperature is not None:  # with 0 there are no draws, and the user knows
        return ""
    options.temperature = 0.0
    return " and ".join(f"--{name.replace('_', '-')}" for name in given)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    def within(value: float, bounds: tuple[float, float]) -> bool:
        return bounds[0] <= value <= bounds[1]

    has_prompt = options.prompt is not None or options.prompt_file is not None
    given = {
        "a prompt": options.prompt is not None,
        "--prompt-file": options.prompt_file is not None,
        "--chat": options.chat,
        "--prompts": options.prompts is not None,
    }
    if sum(given.values()) != 1:
        got = " and ".join(name for name, is_given in given.items() if is_given) or "none"
        parser.error(f"expected one of a prompt, --prompt-file, --chat and --prompts; got {got}")
    if options.profile and not has_prompt:
        parser.error("expected --profile with a prompt; got it without")
    if options.lookup and options.prompts is not None:
        parser.error("expected --lookup with a prompt or --chat; got it with --prompts")
    for name, needed, default in (("context", "chat", 2048), ("rows", "prompts", 8)):
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif not getattr(options, needed):
            parser.error(f"expected --{name} with --{needed}; got it without")
    drawn, penalty = _fill_sampling(options), options.repetition_penalty
    rules = [
        (options.context >= 1, "--context of 1 or more", options.context),
        (options.rows >= 1, "--rows of 1 or more", options.rows),
        (options.max_tokens >= 1, "--max-tokens of 1 or more", options.max_tokens),
        (
            within(options.temperature, TEMPERATURES),
            "--temperature from {:g} to {:g}".format(*TEMPERATURES),
            options.temperature,
        ),
        (0 <= options.top_k < 2**31, "--top-k from 0 to 2**31 - 1", options.top_k),
        (0 < options.top_p <= 1, "--top-p above 0 and up to 1", options.top_p),
        (0 <= options.min_p <= 1, "--min-p from 0 to 1", options.min_p),
        (within(penalty, PENALTIES), "--repetition-penalty from {:g} to {:g}".format(*PENALTIES), penalty),
        (0 <= options.seed < 2**32, "--seed from 0 to 2**32 - 1", options.seed),
        ("" not in options.stop, "--stop of at least one character", repr("")),
        (not drawn, f"--temperature with {drawn}, as nothing is drawn without", "none"),
    ]
    for holds, expected, got in rules:
        if not holds:
            parser.error(f"expected {expected}; got {got}")


def _check_one_device(parser: Parser, options: argparse.Namespace) -> None:
    several = options.processes > 1
    is_split = several or options.devices > 1
    rules = [
        (is_split or options.split is None, "several devices for --split", "one"),
        (not (several and options.profile), "one process for --profile", options.processes),
        (not (several and options.lookup), "one process for --lookup", options.processes),
        (not (options.split == "sequence" and options.lookup), "--lookup with --split model", "sequence"),
        (not (options.split == "sequence" and options.cache), "--cache with --split model", "sequence"),
        (not (several and options.chat), "one process for --chat", options.processes),
    ]
    for holds, expected, got in rules:
        if not holds:
            parser.error(f"expected {expected}; got {got}")
