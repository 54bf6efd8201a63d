"""Train a transformer on a CPU: `python -m models.train gpt --out RUN`, or `vit`.

The models are written with `equinox.nn`, and what is trained is what `eqxcallback.fuse` makes of them. A folder has all of a run:
options, snapshots, losses and their plot. Results go to stdout, and progress to stderr.
"""

import argparse
import contextlib
import dataclasses
import sys

import jax

from .._program import UsageError, progress, run, write
from .._text import without_surrogates
from ..compilation_cache import keep_programs
from ..decoding.sampling import Sampling
from ..parallel import processes
from . import text_data
from .options import parse, run_options
from .run import Training
from .run_folder import RunFolder
from .tasks import make_task
from .text_sample import go_on


def begin(options: argparse.Namespace, folder: RunFolder, text: str | None) -> None:
    """Write all that a run needs."""
    begun = run_options(options)
    if text is not None:
        checksum = text_data.prepare(text, folder.path, vocab_size=options.vocab, progress=progress)
        begun = dataclasses.replace(begun, checksum=checksum)
    make_task(begun, folder.path)  # which says if the text is too short
    folder.begin(begun)


def _sample(options: argparse.Namespace, folder: RunFolder) -> None:
    if folder.options().model != "gpt":
        raise UsageError(f"expected the run of a gpt; {folder.path} has a {folder.options().model}")
    if not options.text:
        raise UsageError("expected a text of some characters; got none")
    tokenizer = text_data.open_tokenizer(folder.path)
    training = Training(folder)
    training.restore()
    if training.step == 0:
        raise UsageError(f"expected a snapshot in {folder.path}, to read the weights from; there is none yet")
    sampling = Sampling(temperature=options.temperature)
    text = go_on(
        training.model(),
        tokenizer,
        without_surrogates(options.text),
        count=options.tokens,
        sampling=sampling,
        seed=options.seed,
        progress=progress,
    )
    write([f"{text}\n"])


def _train(arguments: list[str] | None) -> None:
    options = parse(arguments)
    folder = RunFolder(options.out)
    if options.command == "sample":
        return _sample(options, folder)
    is_new, is_first = options.command != "resume", options.process == 0
    text = text_data.read_text(options.text) if options.command == "gpt" and is_first else None
    count = (run_options(options) if is_new else folder.options()).devices  # before a folder is made
    if count % options.processes:
        raise UsageError(f"expected --processes to divide the {count} devices of the run; got {options.processes}")
    if is_new and is_first:
        folder.expect_new()
    with folder.locked() if is_first else contextlib.nullcontext():  # process 0 alone writes
        if is_new and is_first:
            folder.expect_new()  # still: until the lock was there, another process may have begun one
        with _devices(options, count) as mesh:
            if is_new and is_first:
                begin(options, folder, text)
            if mesh is not None:
                processes.total(mesh, 0)  # now it is there for the others to read
            if is_new and dataclasses.replace(folder.options(), checksum=None) != run_options(options):
                raise UsageError(
                    f"process {options.process} expected the options of process 0; got others. Pass the same ones."
                )
            training = Training(folder, mesh)
            training.restore()
            training.train()


def _devices(options: argparse.Namespace, count: int) -> contextlib.AbstractContextManager[jax.sharding.Mesh | None]:
    """Return the devices of a run, which has `count` of them in all processes."""
    if count == 1:
        return contextlib.nullcontext()
    return processes.joined(count // options.processes, options.coordinator, options.processes, options.process)


def main(arguments: list[str] | None = None) -> int:
    return run("train", _train, arguments, remedy="Begin a run with a lower --batch.")


if __name__ == "__main__":
    keep_programs()
    code = main()
    processes.leave(code)
    sys.exit(code)
