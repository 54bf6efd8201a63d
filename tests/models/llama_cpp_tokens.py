"""Tokens that llama.cpp makes of hard texts, by each way to cut texts into words, in a file that tests without it read.

`python -m tests.models.llama_cpp_tokens` writes the file anew. It needs llama-cpp-python. The vocabulary is the first part of
SmolLM2's, with numbers, and a word that no merges make.
"""

import importlib
import json
import pathlib
import tempfile
import unicodedata
from typing import Any

import numpy as np
from gguf import GGUFWriter

from models.gguf import default_path, open_model
from models.tokens import words


PATH = pathlib.Path(__file__).with_suffix(".json")
SIZE = 4000
NUMBERS = {
    "1 2": "12",
    "12 3": "123",
    "123 4": "1234",
    "5 6": "56",
    "7 8": "78",
    "56 78": "5678",
    "0 0": "00",
    "00 0": "000",
}
UNMERGED = "ĠSCREAMING"
TEXTS = [
    "Hello, world!  How're YOU'LL they'd I'M it's 'twas 'S\n\n\n  indented\t\ttabs \r\n end  ",
    "1 12 123 1234 12345678 3.14159 1,000,000 $99.95 50% 7th x86_64 v1.2.3 0xFF ½ ٣٤٥ Ⅷ 一二三4五",
    "def f(x): return {'a': [x**2 for _ in range(10)]} # comment\n\n    if a<=b && c!=d || !e: y = a^b~c|d`e`\n",
    "naïve café Ünïcödé ÉCOLE Straße ǅungla ﬁn ʰello Ωmega Привет, мир! Γειά σου",  # noqa: RUF001
    "日本語のテキスト、漢字とカタカナ。中文文本，没有空格！한국어 텍스트 ไทย हिन्दी العَرَبِيَّة עברית",  # noqa: RUF001
    "👩‍👩‍👧‍👦 emoji🙂🙃 mixed🦙text …“quotes” ‘single’ — dash – en • bullet © ® ™ € £ ¥ ₿ ∑ ≤ ≠ → ⇒",  # noqa: RUF001
    "e\u0301 a\u0300\u0301b \u00a0nbsp\u3000ideographic\u2003em \u200bzero\u2028line",
    "CamelCaseWords snake_case_words kebab-case SCREAMING_CASE iPhone McDonald's O'Neill rock'n'roll ...!!!??? --- === ///",
    " leading space\n leading newline\n\n \n  \n x",
]


def metadata_of(name):
    metadata = open_model(default_path()).metadata
    tokens = metadata["tokenizer.ggml.tokens"][:SIZE]
    known = set(tokens)
    return {
        **metadata,
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*tokens, *NUMBERS.values(), UNMERGED],
        "tokenizer.ggml.token_type": np.append(metadata["tokenizer.ggml.token_type"][:SIZE], [1] * (len(NUMBERS) + 1)),
        "tokenizer.ggml.merges": [x for x in metadata["tokenizer.ggml.merges"] if x.replace(" ", "") in known]
        + [*NUMBERS],
    }


def computed(name):
    """Return what llama.cpp makes of the texts now."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    metadata = metadata_of(name)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocabulary.gguf"
        writer = GGUFWriter(path, "llama")
        for add, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 64), ("head_count", 1)):
            getattr(writer, f"add_{add}")(value)
        writer.add_feed_forward_length(64)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(metadata["tokenizer.ggml.tokens"])
        writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
        writer.add_token_merges(metadata["tokenizer.ggml.merges"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        # Qwen's own tokenizer composes characters first, and llama.cpp does not.
        texts = [unicodedata.normalize("NFC", text) if name == "qwen2" else text for text in TEXTS]
        return [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]


if __name__ == "__main__":
    PATH.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(computed(name))}' for name in words.NAMES) + "\n}\n")
