"""Sizes of models that people run, for benchmarks and tests."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Model:
    """**Attributes:**

    - `length`: of its sequences, at most.
    - `is_gated`: whether its feed-forward blocks have a gate.
    """

    name: str
    layers: int
    embedding: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    length: int
    causal: bool
    is_gated: bool

    @property
    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """The matrices of one layer: `(out_features, in_features)`."""
        heads = (self.heads + 2 * self.kv_heads) * self.head_size
        return {
            "qkv": (heads, self.embedding),
            "attention_out": (self.embedding, self.heads * self.head_size),
            "up": (self.hidden * (1 + self.is_gated), self.embedding),
            "down": (self.embedding, self.hidden),
        }

    def attention(self, batch: int, length: int | None = None) -> "Attention":
        length = self.length if length is None else length
        return Attention(batch, self.heads, self.kv_heads, length, self.head_size, self.causal)


class Attention(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    causal: bool

    def __str__(self) -> str:
        groups = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        causal = ", causal" if self.causal else ""
        return f"b{self.batch} h{self.heads}{groups} s{self.length} d{self.size}{causal}"

    @property
    def flops(self) -> float:
        """The operations of the forward pass. A backward pass is five products of the size of its two."""
        full = 4 * self.batch * self.heads * self.length**2 * self.size
        return full / 2 if self.causal else full

    @property
    def operand_shapes(self) -> Iterator[tuple[int, int, int, int]]:
        """Queries, keys, values."""
        for heads in (self.heads, self.kv_heads, self.kv_heads):
            yield self.batch, self.length, heads, self.size


SMOLLM2 = Model("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, 8192, causal=True, is_gated=True)
GPT2 = Model("GPT-2", 12, 768, 3072, 12, 12, 64, 50_257, 1024, causal=True, is_gated=False)
BERT = Model("BERT-base", 12, 768, 3072, 12, 12, 64, 30_522, 512, causal=False, is_gated=False)
VIT = Model("ViT-B", 12, 768, 3072, 12, 12, 64, 1000, 197, causal=False, is_gated=False)
MODELS = (SMOLLM2, GPT2, BERT, VIT)

# For a run in which every path of the code is taken once.
TINY = Model("tiny", 2, 64, 96, 4, 2, 16, 128, 48, causal=True, is_gated=True)
# With a key/value head for each head, and no gate, as GPT-2 has it.
TINY_GPT = dataclasses.replace(TINY, kv_heads=TINY.heads, is_gated=False)
