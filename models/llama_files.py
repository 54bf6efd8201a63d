"""A Llama in files like those that it came from: a GGUF file, or a folder of Hugging Face's transformers."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFValueType

import eqxcallback as eqxc

from ._json import read_object
from ._replacing import replace_files
from ._safetensors import INDEX, weight_files, write_tensors
from .gguf import ModelFile
from .gguf_writer import Encoded, Field, write_gguf
from .huggingface import Folder, published_name
from .llama import Llama
from .llama_tensors import tensors


# The files of a folder that are not weights.
_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)


def save(path: str | os.PathLike[str], model: Llama, file: ModelFile | Folder) -> None:
    """Write a model with the weights that it has now. `models.model_files.open_files` opens it, and so does what opens `file`.

    `models.llama.load`, with the `dtype` of the model, gives the very same weights again, bit by bit.

    **Arguments:**

    - `path`: where to write: a GGUF file if `file` is one, else a folder, which is made if there is none. A file is replaced once
        the new one is whole. A folder is new or empty, or the one of `file`, whose weights are replaced.
    - `model`: without adapters, or with merged ones.
    - `file`: from which the model was loaded. Its config, tokenizer and chat template are copied.

    **Raises:** `OSError` if a file cannot be written, `FileExistsError` if a folder has other files.
    """
    if model.config != file.config:
        raise ValueError("save: expected the file that the model was loaded from; got one with another config.")
    write(path, tensors(model, rotates_neighbours=file.rotates_neighbours), file)


def write(path: str | os.PathLike[str], named: Mapping[str, Encoded], file: ModelFile | Folder) -> None:
    """Write a model with other tensors, as `save` does.

    **Arguments:**

    - `named`: all tensors of the model, by their names in GGUF files, with their rows in the order of `file`.
    """
    if isinstance(file, ModelFile):
        _write_gguf(path, named, file)
    else:
        _write_folder(pathlib.Path(path), named, file)


def check_folder(path: pathlib.Path, file: Folder) -> None:
    """Raise `FileExistsError` if a folder has files that are not of the model: a template, say, would be taken for the model's,
    and weights of another model would be lost."""
    if path.is_dir() and not path.samefile(file.path) and (others := sorted(path.iterdir())):
        raise FileExistsError(
            f"expected a folder that is new or empty, or that of the model; got {path} with {others[0].name} in it. "
            "Pass another folder."
        )


def _write_gguf(path: str | os.PathLike[str], named: Mapping[str, Encoded], file: ModelFile) -> None:
    named = dict(named)
    if "rope_freqs.weight" in file.tensors:  # a linear scaling is in the metadata
        named["rope_freqs.weight"] = Encoded("F32", file.tensors["rope_freqs.weight"].data)
    fields = {
        key: Field(value, file.types[key])
        for key, value in file.metadata.items()
        if not key.startswith("split.")  # whatever parts it came in
    }
    architecture = fields.pop("general.architecture").value
    if any(
        name not in file.tensors or file.tensors[name].encoding != tensor.encoding for name, tensor in named.items()
    ):
        fields.pop("general.file_type", None)  # it names the encoding of most tensors
    if any(tensor.encoding in eqxc.ops.ENCODINGS for tensor in named.values()):
        version = Field(GGML_QUANT_VERSION, GGUFValueType.UINT32)
        fields.setdefault("general.quantization_version", version)
    write_gguf(path, architecture, fields, named)


def _write_folder(path: pathlib.Path, named: Mapping[str, Encoded], file: Folder) -> None:
    if quantised := [name for name, tensor in named.items() if tensor.encoding in eqxc.ops.ENCODINGS]:
        raise ValueError(
            f"save: expected weights that are not quantised, for a folder of safetensors files; got {quantised[0]} of "
            f"{named[quantised[0]].encoding}. Use a GGUF file."
        )
    check_folder(path, file)
    # In rows: safetensors writes the memory as it lies.
    arrays = {published_name(name): np.ascontiguousarray(tensor.data) for name, tensor in named.items()}
    settings = read_object(file.path / "config.json")
    dtypes = {array.dtype.name for array in arrays.values() if array.ndim > 1}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"  # which holds them all
    settings |= {key: dtype for key in ("dtype", "torch_dtype") if key in settings}  # a new and an old name
    text = json.dumps(settings, indent=2) + "\n"
    weights = path / "model.safetensors"
    path.mkdir(exist_ok=True)
    old: list[pathlib.Path] = []
    if path.samefile(file.path):
        old = [] if weights.exists() else [path / INDEX, *weight_files(path)]
    else:
        for name in _COPIED:
            if (file.path / name).exists():
                shutil.copyfile(file.path / name, path / name)
    # The config comes last: readers refuse a folder that has none.
    replace_files(
        {
            weights: lambda partial: write_tensors(partial, arrays, {"format": "pt"}),
            path / "config.json": lambda partial: partial.write_text(text),
        }
    )
    for part in old:  # whose tensors are in the new file
        part.unlink(missing_ok=True)
