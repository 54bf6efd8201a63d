"""The words of byte-level BPE tokenizers: texts are cut into them first, and nothing is merged across an edge.

They have the names that llama.cpp gave them, which GGUF files have as `tokenizer.ggml.pre`.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import pre_tokenizers


# Patterns cut one after the other: what one of them matches is a word, and so is what is between two matches.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT_THEN_GPT2 = (r"\p{N}", _GPT2)
_THREE_DIGITS = "[0-9][0-9][0-9]"


def _llama3(digits: str) -> tuple[str, ...]:
    """The words of Llama 3 and of Qwen2. They differ in how many digits are one."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )


_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGIT_THEN_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _llama3("{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _llama3("")),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
NAMES = tuple(_PATTERNS)
LLAMA3 = frozenset(["llama-bpe", "llama3", "llama-v3"])
"""The names of Llama 3's. Its tokenizer takes a whole word that is a token first, whatever the merges, and puts a token before
each text."""


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return what cuts a text into words, whose bytes are written as GPT-2 does. `name` is one of `NAMES`."""
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in _PATTERNS[name]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
