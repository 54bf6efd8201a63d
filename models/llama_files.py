"""A Llama in files like those that it came from: a GGUF file, or a folder of Hugging Face's transformers."""

import json
import os
import pathlib
import shutil

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFValueType

import eqxcallback as eqxc

from ._json import read_object
from ._replacing import replace_file
from ._safetensors import write_tensors
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

    - `path`: where to write: a GGUF file if `file` is one, else a folder, which is made if there is none. An existing file is
        replaced once the new one is whole.
    - `model`: without adapters, or with merged ones.
    - `file`: from which the model was loaded. Its config, tokenizer and chat template are copied.

    **Raises:** `OSError` if a file cannot be written.
    """
    if model.config != file.config:
        raise ValueError("save: expected the file that the model was loaded from; got one with another config.")
    if isinstance(file, ModelFile):
        _save_gguf(path, model, file)
    else:
        _save_folder(pathlib.Path(path), model, file)


def _save_gguf(path: str | os.PathLike[str], model: Llama, file: ModelFile) -> None:
    named = tensors(model, rotates_neighbours=file.rotates_neighbours)
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


def _save_folder(path: pathlib.Path, model: Llama, file: Folder) -> None:
    named = tensors(model, rotates_neighbours=file.rotates_neighbours)
    if quantised := [name for name, tensor in named.items() if tensor.encoding in eqxc.ops.ENCODINGS]:
        raise ValueError(
            f"save: expected weights that are not quantised, for a folder of safetensors files; got {quantised[0]} of "
            f"{named[quantised[0]].encoding}. Use a GGUF file."
        )
    # In rows: safetensors writes the memory as it lies.
    arrays = {published_name(name): np.ascontiguousarray(tensor.data) for name, tensor in named.items()}
    path.mkdir(exist_ok=True)
    write_tensors(path / "model.safetensors", arrays, {"format": "pt"})
    settings = read_object(file.path / "config.json")
    settings |= {key: model.dtype.name for key in ("dtype", "torch_dtype") if key in settings}  # a new and an old name
    replace_file(path / "config.json", lambda partial: partial.write_text(json.dumps(settings, indent=2) + "\n"))
    for name in () if path.samefile(file.path) else _COPIED:
        if (file.path / name).exists():
            shutil.copyfile(file.path / name, path / name)
