"""Fine-tune a language model on a CPU: `python -m models.finetune models/data/ahoy.jsonl --output ADAPTER`.

The model's weights keep their 4 bits, and low-rank adapters (LoRA) are trained beside them. `python -m models.generate
--adapter ADAPTER` answers with them, and so does Hugging Face's PEFT. What it did goes to stdout, as a JSON object; progress to
stderr.
"""

import argparse
import contextlib
import json
import math
import pathlib
import sys
from functools import partial

import jax
import numpy as np

from .. import _program, adapter_files, llama, lora
from .._locking import expect_own, locked
from .._program import Parser, UsageError, add_weights
from .._writable import expect_writable
from ..compilation_cache import keep_programs
from ..model_files import open_files
from .examples import batches, read_examples
from .training import Training, expect_finite, expect_finite_adapters
from .tuner import Tuner


# The text in the lock of a folder with snapshots.
_MARK = b"python -m models.finetune\n"
_SAVE_EVERY = 20
# The options that a run goes on with.
_KEPT = ("held_out", "max_tokens", "rank", "alpha", "targets", "epochs", "batch", "learning_rate", "seed")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m models.finetune", description="Train adapters (LoRA) for a language model.")
    parser.add_argument(
        "data", type=pathlib.Path, metavar="DATA", help="a .jsonl file: a prompt and a response in each line"
    )
    parser.add_argument("--output", type=pathlib.Path, required=True, metavar="FOLDER", help="where the adapter goes")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of the lines, not trained on (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="of a line; what is longer is cut (default: 512)")
    adapter = parser.add_argument_group("adapter")
    adapter.add_argument("--rank", type=int, default=8, help="of the update of a weight (default: %(default)s)")
    adapter.add_argument("--alpha", type=float, help="updates are multiplied by alpha / rank (default: twice the rank)")
    adapter.add_argument(
        "--targets",
        default=",".join(lora.TARGETS),
        metavar="NAMES",
        help="the layers that are tuned (default: %(default)s)",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, default=4, help="how often each line is seen (default: %(default)s)")
    training.add_argument("--batch", type=int, default=4, help="lines in one step (default: %(default)s)")
    training.add_argument(
        "--learning-rate", type=float, default=1e-3, help="of the first step; it falls to 0 (default: %(default)s)"
    )
    training.add_argument("--seed", type=int, default=0, help="of the adapter and the order (default: %(default)s)")
    training.add_argument(
        "--snapshots",
        type=pathlib.Path,
        metavar="FOLDER",
        help="keep snapshots here, so that the same command goes on after a stop",
    )
    training.add_argument(
        "--save-every", type=int, metavar="N", help=f"steps between two snapshots (default: {_SAVE_EVERY})"
    )
    model = parser.add_argument_group("model")
    add_weights(model)
    options = parser.parse_args(arguments)
    options.targets = [name.strip() for name in options.targets.split(",")]
    options.alpha = 2.0 * options.rank if options.alpha is None else options.alpha
    _check(parser, options)
    return options


def _check(parser: Parser, options: argparse.Namespace) -> None:
    def positive(value: float) -> bool:
        return 0 < value < math.inf

    unknown = [name for name in options.targets if name not in lora.TARGETS]
    rules = [
        (0 <= options.held_out < 1, "--held-out from 0 to less than 1", options.held_out),
        (options.max_tokens >= 2, "--max-tokens of 2 or more", options.max_tokens),
        (options.rank >= 1, "--rank of 1 or more", options.rank),
        (positive(options.alpha), "--alpha above 0", options.alpha),
        (not unknown, f"--targets of {', '.join(lora.TARGETS)}", ", ".join(map(repr, unknown))),
        (options.epochs >= 1, "--epochs of 1 or more", options.epochs),
        (options.batch >= 1, "--batch of 1 or more", options.batch),
        (positive(options.learning_rate), "--learning-rate above 0", options.learning_rate),
        (options.save_every is None or options.save_every >= 1, "--save-every of 1 or more", options.save_every),
        (options.save_every is None or options.snapshots is not None, "--snapshots FOLDER with --save-every", "none"),
        (0 <= options.seed < 2**32, "--seed from 0 to 2**32 - 1", options.seed),
        (options.output.parent.is_dir(), "--output in a folder that exists", options.output),
        (not options.output.is_file(), "--output to be a folder", f"a file, {options.output}"),
    ]
    for holds, expected, got in rules:
        if not holds:
            parser.error(f"expected {expected}; got {got}")


def _split(count: int, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The lines that are trained on, and those that are held out."""
    if share == 0:
        return np.arange(count), np.arange(0)
    held_out = max(1, round(count * share))
    if held_out >= count:
        raise UsageError(
            f"expected more lines than the {held_out} that are held out; got {count}. Pass more, or --held-out 0."
        )
    order = rng.permutation(count)
    return order[held_out:], order[:held_out]


def _finetune(arguments: list[str] | None) -> None:
    options = _parse(arguments)
    expect_writable(options.output)
    with _lock_of(options.snapshots):
        _tune(options)


def _lock_of(folder: pathlib.Path | None) -> contextlib.AbstractContextManager[None]:
    """Return the lock of a folder for snapshots, which has to be a new one or ours."""
    if folder is None:
        return contextlib.nullcontext()
    expect_own(folder, _MARK, "--snapshots")
    return locked(folder, _MARK)


def _tune(options: argparse.Namespace) -> None:
    file, tokenizer = open_files(options.weights)
    if options.max_tokens > file.config.context_length:
        raise UsageError(
            f"expected --max-tokens up to the model's context, {file.config.context_length}; got {options.max_tokens}"
        )
    lines, cut = read_examples(options.data, tokenizer, max_tokens=options.max_tokens)
    if cut:
        _program.report(
            f"finetune: {cut} of {len(lines)} lines have more than {options.max_tokens} tokens, and were cut"
        )
    rng = np.random.default_rng(options.seed)
    parts = _split(len(lines), options.held_out, rng)
    chosen, held_out = ([example for index in part for example in lines[index]] for part in parts)
    epochs = [batches(chosen, options.batch, rng) for _ in range(options.epochs)]
    # The tuner has copies of the blocks and the adapters, so no name here keeps what it was given.
    tuner = Tuner(
        llama.load(file, progress=partial(_program.progress, desc="loading", unit="block")),
        lora.init(
            file.config,
            rank=options.rank,
            scale=options.alpha / options.rank,
            targets=options.targets,
            key=jax.random.key(options.seed),
        ),
        learning_rate=options.learning_rate,
        steps=sum(map(len, epochs)),
    )

    def perplexity() -> float:
        shown = partial(_program.progress, desc="held-out lines", unit="batch")
        return tuner.perplexity(batches(held_out, options.batch), shown)

    training = Training(
        tuner,
        epochs,
        folder=options.snapshots,
        save_every=options.save_every or _SAVE_EVERY,
        options={name: getattr(options, name) for name in _KEPT},
    )
    training.begin(lambda: math.nan if not held_out else perplexity())
    before = float(training.record.before) if held_out else None
    if before is not None:
        _program.report(f"perplexity of {len(parts[1])} held-out lines before: {before:.2f}")
    training.train()
    losses = (training.record.sums / training.record.counts).tolist()
    tokens = options.epochs * sum(len(example.tokens) for example in chosen)  # without padding
    after = perplexity() if held_out else None
    # A step's loss is that before it, so this alone says if the last step has broken the adapter. Then the old one stays.
    last = tuner.perplexity(epochs[-1][-1:]) if after is None else after
    if before is None or math.isfinite(before) or math.isnan(last):  # else the model alone was no better
        expect_finite(last, "perplexity after the last step")
    expect_finite_adapters(tuner)
    try:
        adapter_files.save(options.output, tuner.adapters, alpha=options.alpha)
    except OSError as error:
        raise UsageError(f"{options.output} cannot be written: {error}") from None
    record = {
        "adapter": str(options.output),
        "lines": len(parts[0]),
        "held_out_lines": len(parts[1]),
        "steps": sum(map(len, epochs)),
        "losses": losses,
        "perplexity_before": _in_json(before),
        "perplexity_after": _in_json(after),
        "tokens_per_second": round(tokens / max(float(training.record.seconds), 1e-9), 1),
    }
    _program.write([f"{json.dumps(record, allow_nan=False)}\n"])


def _in_json(number: float | None) -> float | None:
    """The number, or `None` for one that JSON does not have."""
    return number if number is not None and math.isfinite(number) else None


def main(arguments: list[str] | None = None) -> int:
    return _program.run("finetune", _finetune, arguments, remedy="Lower --batch or --max-tokens.")


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
