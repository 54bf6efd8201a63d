"""Write a language model with an adapter inside its weights: `python -m models.finetune.merge ADAPTER --output MODEL.gguf`.

The file is of the kind that the model came in, a GGUF file or a folder with safetensors files, and every program that reads such
files takes it. Tensors that no adapter changes are those of the model, bit by bit.
"""

import argparse
import json
import pathlib
import sys
from functools import partial
from typing import Any

import jax.numpy as jnp

import eqxcallback as eqxc

from .. import _program, adapter_files, llama, llama_files, lora
from .._program import Parser, UsageError, add_weights
from .._writable import expect_writable
from ..compilation_cache import keep_programs
from ..gguf import ModelFile
from ..gguf_writer import Encoded
from ..huggingface import Folder
from ..llama_tensors import tensors
from ..model_files import open_files


# The choices of `--encoding`.
_ENCODINGS = ("F32", "BF16", "Q8_0", "Q4_1")
# The layers of a block in GGUF files, by their names in an adapter.
_LAYERS = {
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    **{"o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
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
    quantises = options.encoding in eqxc.ops.ENCODINGS
    output, kind = options.output, "file" if isinstance(file, ModelFile) else "folder"
    if not output.parent.is_dir() or (output.is_dir() if kind == "file" else output.is_file()):
        raise UsageError(f"expected --output to be a {kind}, in a folder that exists; got {output}")
    if kind == "folder" and quantises:
        raise UsageError(f"expected --encoding F32 or BF16 for a folder with safetensors files; got {options.encoding}")
    config = file.config
    sizes = {config.embedding_size, config.num_heads * config.head_size, config.hidden_size}
    if quantises and any(size % 32 for size in sizes):
        raise UsageError(
            f"expected --encoding F32 or BF16 for layers of {sorted(sizes)} features; got {options.encoding}"
        )
    if isinstance(file, Folder):
        try:
            llama_files.check_folder(output, file)
        except FileExistsError as error:
            raise UsageError(f"--output: {error}") from None
    expect_writable(output)
    adapters = adapter_files.load(options.adapter, file.config)
    try:
        changed = _changed(file, adapters, options.encoding)
    except ValueError as error:  # numbers that are too large for the encoding
        raise UsageError(f"the adapter cannot be merged: {error}") from None
    others = {name: Encoded(tensor.encoding, tensor.data) for name, tensor in file.tensors.items()}
    try:
        llama_files.write(output, others | changed, file)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error}") from None
    _program.write([f"{json.dumps({'model': str(output), 'encoding': options.encoding})}\n"])


def _changed(file: ModelFile | Folder, adapters: lora.Adapters, encoding: Any) -> dict[str, Encoded]:
    """The weights that adapters change, by their names in GGUF files. They are added up in f32, and rounded once."""
    model = llama.load(file, progress=partial(_program.progress, desc="loading", unit="block"))
    quantised = encoding if encoding in eqxc.ops.ENCODINGS else None
    merging = partial(_program.progress, desc="merging", unit="layer")
    merged = lora.merge(lora.attach(model, adapters), encoding=quantised, progress=merging)
    named = tensors(merged, rotates_neighbours=file.rotates_neighbours)
    changed = {
        name: named[name]
        for index, block in enumerate(adapters.blocks)
        for adapter in block.values()
        for name in (f"blk.{index}.{_LAYERS[target]}.weight" for target in adapter.updates)
    }
    if encoding == "BF16":
        return {name: Encoded(encoding, tensor.data.astype(jnp.bfloat16)) for name, tensor in changed.items()}
    return changed


def main(arguments: list[str] | None = None) -> int:
    return _program.run("finetune.merge", _merge, arguments)


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
