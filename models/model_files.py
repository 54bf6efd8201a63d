"""A model's files, of either kind: a GGUF file, or a folder of Hugging Face's transformers."""

import os
import pathlib

from . import gguf, huggingface
from ._errors import ModelFileError
from .tokens.huggingface_tokenizer import read_vocabulary
from .tokens.tokenizer import Tokenizer


def open_files(path: str | os.PathLike[str] | None) -> tuple[gguf.ModelFile | huggingface.Folder, Tokenizer]:
    """Open a model, and check that its files are whole.

    **Arguments:**

    - `path`: a GGUF file, or a folder with `config.json`, safetensors files and `tokenizer.json`.
        `None` is SmolLM2-135M-Instruct.

    **Returns:** what `models.llama.load` and `models.llama_files.save` take, and the tokenizer.

    **Raises:**

    - `ModelFileError`, whatever is wrong with a file.
    """
    path = gguf.default_path() if path is None else pathlib.Path(path)
    if not path.is_dir():
        file = gguf.open_model(path)
        return file, Tokenizer(file.metadata)
    if not (path / "config.json").exists():
        raise ModelFileError(
            f"{path}: expected a GGUF file, or a model's folder with config.json; got a folder without it."
        )
    folder = huggingface.open_folder(path)
    return folder, Tokenizer(read_vocabulary(path, folder.config.vocab_size))
