"""The rows of docs/gpus.md that have no kernel, and why: `python -m tests.ops.without_kernels` prints the page's list anew."""

import textwrap

from .on_cuda import BY_TENSOR_CORES, PLAIN, Row


_LONG = "heads longer than 256"
_QUANTIZED = ("quantized_linear", "quantized_linear_swiglu")
# The rows of the table that have no kernel, forward or backward, and why.
REASONS: tuple[tuple[tuple[Row, ...], str], ...] = (
    (
        (("linear", "also with bias"), ("embedding", PLAIN)),
        "`linear` and `embedding`: XLA's libraries multiply as fast as a GPU can, and rows are read and written once.",
    ),
    (
        (("gelu", "also approximate=False"),),
        "`gelu`: XLA computes it where its operand is made or its result is read; a kernel would write one and read the other.",
    ),
    (
        (("rotary_append", PLAIN), ("cache_append", "also of a batch")),
        "Gradients of `rotary_append` and `cache_append`: XLA reads the rows of the cache's gradient, and writes zeros "
        "over them in place. A kernel would make [another array of the cache's size](design/gpu.md).",
    ),
    (
        (("linear_cross_entropy", "any option"),),
        "`linear_cross_entropy`: XLA's plan has nothing left that takes 5% of a step: beside the products, the logits are "
        "read once for the loss and once for its gradients. [The count](design/gpu.md) is part of the tests.",
    ),
    (
        (("int8_linear", "activations exact"), ("int8_linear", "activations int8")),
        "`int8_linear`: XLA converts `int8` within the product. One row times 4,096 x 4,096 weights reads 16.9 MB, and "
        'the weights have 16.8. With `activations="int8"` it multiplies integers on tensor cores.',
    ),
    (
        tuple((op, "more rows") for op in _QUANTIZED),
        "`quantized_linear` with more rows: the weights are expanded, written and read in 16 bits, so that "
        'tensor cores multiply them. With 4,096 x 4,096 weights in `"Q4_1"` that is 92 MB, or 21 us at 4.3 TB/s, and '
        "2,048 rows take 86 us of products at 800 TFLOP/s. On an H100 2,048 rows over 14,336 x 4,096 weights have 518 TFLOP/s, "
        "and 741 over weights that are in bf16 already. With fewer than 500 rows expanding takes longer than multiplying.",
    ),
    (
        tuple((op, rows) for op in _QUANTIZED for rows in ("up to 8 rows", BY_TENSOR_CORES)),
        "Gradients of `quantized_linear`: the weights are expanded for them too, which is as much as above. They are for "
        "a few layers over weights that do not change, where all rows of a batch share this.",
    ),
    (
        tuple((op, words) for op in _QUANTIZED for words in ("activations int8", "rows side by side")),
        '`quantized_linear` with `activations="int8"` or rows side by side: both are for CPUs. On a GPU they expand the weights '
        'in each call: one row times 4,096 x 4,096 weights in `"Q8_0"` moves 105 MB, and the blocks have 17.8. Pass exact '
        "activations and the blocks of the file, `layer.unpacked()`.",
    ),
    (
        tuple((op, _LONG) for op in ("attention", "attention_with_lse")),
        "`attention` with heads longer than 256: logits go through memory. With 8 heads of 320 and 4,096 tokens in bf16 "
        "that is 2.8 GB, or 0.64 ms at 4.3 TB/s, beside 0.21 ms of products at 800 TFLOP/s; of the gradients 5.8 GB, or "
        "1.35 ms, beside 0.54. A kernel would be faster: the registers of our tiles end at 256.",
    ),
    (
        tuple(("decode_attention", words) for words in ("many heads share keys", "heads longer than 1024")),
        "Gradients of `decode_attention` with more than eight heads that share keys, or four longer than 256: the "
        "[instructions](design/gpu_predictions.md) of our kernels take longer than XLA's bytes. With eight examples of 4,096 "
        "keys, 8 heads of the cache, and nine of 128 for each of these, XLA moves 1.24 GB in bf16, or 0.29 ms at 4.3 TB/s; "
        "our kernels would move 0.4 GB, and take 0.33 ms. Heads longer than 1,024, of which registers do not hold a row: "
        "forward they move 0.4 GB where the cache has 0.14. Training goes through `attention`, which has kernels for it.",
    ),
)


def page() -> str:
    return "\n".join(textwrap.fill(f"- {text}", 130, subsequent_indent="  ") for _, text in REASONS)


if __name__ == "__main__":
    print(page())
