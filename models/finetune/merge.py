"""Write a language model with an adapter inside its weights: `python -m models.finetune.merge ADAPTER --output MODEL.gguf`.

The file is of the kind that the model came in, a GGUF file or a folder with safetensors files, and every program that reads such
files takes it.
"""

import argparse
import json
import pathlib
import sys
from functools import partial
from typing import Any

import jax.numpy as jnp

from .. import _program, adapter_files, llama, llama_files, lora
from .._program import Parser, UsageError, add_weights
from .._writable import expect_writable
from ..compilation_cache import keep_programs
from ..gguf import ModelFile
from ..model_files import open_files


# The choices of `--encoding`: the dtype of weights that are not quantised, and the encoding of the merged weights.
_ENCODINGS: dict[str, tuple[str, Any]] = {
    "F32": ("float32", None),
    "BF16": ("bfloat16", None),
    "Q8_0": ("float32", "Q8_0"),
    "Q4_1": ("float32", "Q4_1"),
}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m models.finetune.merge", description="Write a model with an adapter in its weights.")
    parser.add_argument(
        "adapter", type=pathlib.Path, metavar="ADAPTER", help="what models.finetune or PEFT has trained"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        required=True,
        metavar="PATH",
        help="where the model goes: a GGUF file, or a folder",
    )
    parser.add_argument(
        "--encoding", choices=_ENCODINGS, default="F32", help="of the weights that change (default: %(default)s)"
    )
    add_weights(parser.add_argument_group("model"))
    return parser.parse_args(arguments)


def _merge(arguments: list[str] | None) -> None:
    options = _parse(arguments)
    file, _ = open_files(options.weights)
    dtype, encoding = _ENCODINGS[options.encoding]
    output, kind = options.output, "file" if isinstance(file, ModelFile) else "folder"
    if not output.parent.is_dir() or (output.is_dir() if kind == "file" else output.is_file()):
        raise UsageError(f"expected --output to be a {kind}, in a folder that exists; got {output}")
    if kind == "folder" and encoding is not None:
        raise UsageError(f"expected --encoding F32 or BF16 for a folder with safetensors files; got {options.encoding}")
    config = file.config
    sizes = {config.embedding_size, config.num_heads * config.head_size, config.hidden_size}
    if encoding is not None and any(size % 32 for size in sizes):
        raise UsageError(
            f"expected --encoding F32 or BF16 for layers of {sorted(sizes)} features; got {options.encoding}"
        )
    expect_writable(output)
    adapters = adapter_files.load(options.adapter, file.config)
    shown = partial(_program.progress, desc="loading", unit="block")
    model = lora.attach(llama.load(file, dtype=jnp.dtype(dtype), progress=shown), adapters)
    try:
        merged = lora.merge(model, encoding=encoding)
    except ValueError as error:  # numbers that are too large for the encoding
        raise UsageError(f"the adapter cannot be merged: {error}") from None
    try:
        llama_files.save(output, merged, file)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error}") from None
    _program.write([f"{json.dumps({'model': str(output), 'encoding': options.encoding})}\n"])


def main(arguments: list[str] | None = None) -> int:
    return _program.run("finetune.merge", _merge, arguments)


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
