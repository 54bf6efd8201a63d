"""Reasons why goals are not met, on each processor with results. `docs/performance.md` says what was tried on the first one.

"not known" begins where nobody has measured further; what the results say follows.
"""

import re
from collections.abc import Mapping


# The first pattern that is in "suite, threads: case: goal" says it.
_EPYC_26 = {
    r"^cross_entropy.*: forward,": "the exponential, 1.2 ns for 16 logits, of which 16 bits come in 0.8",
    r"^norms.*: softmax backward,": "JAX's step to a program: 5 us, but 60 to 80 where other contestants have used the caches",
    r"^norms.*: layer_norm of an ensemble": "memory: it takes as long as one model with as many rows",
    r"^linear.*: one token, ": "memory: rows that are apart are read at 0.8 to 0.93 of the speed of a plain read",
    r"^linear.*: 512 tokens, int8": "the multiply-adds of f32, as XLA's product, whose weights need no decoding",
    r"^linear.*: 512 tokens, bfloat16": "PyTorch's product on two cores; on one ours is as fast",
    r"^embed.*: a query": "memory of the weights: a second thread reads no faster",
    r"^(embed|training)(?!.*memory).*, float32: ": "products of f32 that XLA has at 0.98 of the multiply-adds",
}
_EPYC_25 = {
    r"^cross_entropy.*: forward,": "the exponential: 16 logits take 2.8 ns in bf16 and 3.0 in f32; 16 bits come in 1.5",
    r"^decode.*, float32,": "not known: in bf16 the same cache is read at 0.96 of a plain read",
    r"^norms, 1 thread: softmax forward": "the exponential: rows that stay in the caches take as long",
    r"^norms, 2 threads: softmax forward.*probe": "not known: two threads have 0.79 of the speed of one",
    r"^norms.*: softmax forward.*peer": "a tie with PyTorch, 0.99",
    r"^norms.*: rms_norm": "not known: two threads have 0.75 of the speed of one",
    r"^norms.*: gelu": "memory: one thread moves as much as two",
    r"^linear.*: one token, Q4_1,": "decoding: 1.5 ns for 32 weights on one thread, whose bytes come in 1.0",
    r"^linear.*: one token, ": "not known: one thread reaches the goal",
    r"^linear.*: 512 tokens, bfloat16": "PyTorch's product on two cores; on one ours is as fast",
    r"^training.*ViT.*, float32: .*Equinox": "products: ours has 0.83 of the multiply-adds, and 1.3 x Equinox would be 0.92",
    r"^embed.*: a query": "a tie with onnxruntime, 0.99",
    r"^embed": "not known: a second thread makes ours 1.7 times as fast, onnxruntime's 1.95",
    r"^generate: prompt": "a second thread makes ours in f32 1.77 times as fast, llama.cpp 1.91 times",
    r"^overhead: a native call, us": "XLA's step to a native call: a bare ffi_call takes 0.23 us",
}
_XEON_207 = {
    r"^cross_entropy.*: forward,": "not known: 16 logits take 8.2 ns in f32, 5.5 in bf16, and their bytes come in 4.1 and 2.2",
    r"^cross_entropy.*: forward \+ backward,": "its forward pass, at 0.39 to 0.62 of the probe; and the gradient is written",
    r"^attention": "the last cache is far away: a head alone has had 0.84 of the probe; exponentials are no multiply-adds",
    r"^decode.*, float32,": "not known: in bf16 the same cache is read as fast as a plain read",
    r"^norms, 1 thread: softmax forward": "the exponential and memory: each alone takes 0.76 to 0.79 of the time",
    r"^norms, 2 threads: softmax forward": "not known: two threads have 1.7 times the speed of one",
    r"^norms.*: gelu": "not known: one thread reaches the goal",
    r"^norms.*: layer_norm backward": "not known: PyTorch has 1.1 times the speed, on one thread alone",
    r"^linear.*: one token, ": "not known: one thread reaches the goal",
    r"^linear.*: 512 tokens, (int8|Q8_0)": "the multiply-adds of f32, as PyTorch's product, whose weights need no decoding",
    r"^training.*, bfloat16: .*Equinox": "no instructions for bf16: a step takes as long as in f32, on two threads 1.3 times",
    r"^training.*, float32: .*peer": "not known: ours has 0.67 to 0.88 of the multiply-adds, PyTorch 0.71 to 0.92",
    r"^embed.*: a query": "not known: a second thread makes ours 1.16 times as fast, onnxruntime's 1.7",
    r"^embed": "XLA's products, half of the time: ours keeps 1.7 of two cores busy",
    r"^overhead: a native call, us": "XLA's step to a native call: a bare ffi_call takes 0.31 us",
    r"^overhead: a native call:": "not known: ours takes 0.05 to 0.09 us more than a bare ffi_call",
    r"^overhead: an empty Python": "XLA's step to a native call: 0.31 us of 0.60, where 0.54 would reach the goal",
    r"^generate: a second start": "not known: JAX's import takes 1.6 times as long as on family 26, the rest 1.9",
}
_XEON_167 = {
    r"^cross_entropy.*: forward,": "memory in pages of 4 KiB: loads alone take as long; the probe has pages of 2 MiB",
    r"^cross_entropy.*: forward \+ backward,": "its forward pass, at 0.67 of the probe; and the gradient is written",
    r"^attention.*: forward \+ backward": "gradients are left to vectors; exponentials are no multiply-adds",
    r"^attention": "exponentials are no multiply-adds; keys, values and weights of f32 are split into bf16",
    r"^decode.*: append": "a tie with XLA, 0.96: both read the last cache, at 22 GB/s",
    r"^norms, 1 thread: softmax forward": "the exponential: rows that stay in the caches take as long",
    r"^norms.*\[512, 576\]": "not known: a second thread makes ours 1.4 times as fast, PyTorch's twice",
    r"^norms.*: (layer_norm|rotary_embedding) forward.*, many": "the memory that a result gets: times vary by a third with it",
    r"^norms, 2 threads: softmax forward.*, many": "not known: 0.98 of the goal",
    r"^norms.*: geglu": "memory: ours moves it as fast as a plain copy",
    r"^norms.*: layer_norm backward": "a tie with PyTorch",
    r"^linear.*: one token, ": "memory: rows that are apart are read at 0.8 of the speed of a plain read",
    r"^training.*memory for ViT": "XLA fuses nothing into our products by tiles: 164 MB, and 140 where products are its own",
    r"^embed.*: a query": "not known: alone in a process it takes 1.7 ms, and beside peers 2.4",
    r"^embed": "not known: a second thread makes ours 1.2 to 1.4 times as fast, PyTorch's 1.4 to 1.9",
    r"^overhead: a native call, us": "XLA's step to a native call: a bare ffi_call takes 0.34 us",
    r"^overhead: an empty Python": "XLA's step to a native call: 0.34 us of 0.57, where 0.48 would reach the goal",
}
_ANYWHERE = {
    r"^cross_entropy.*: forward \+ backward,": "the gradient is written, and the probe reads alone",
    r"^attention.*causal.*probe": "half of the tiles on the diagonal are thrown away; exponentials are no multiply-adds",
    r"^attention.*probe": "exponentials are no multiply-adds",
    r"^decode.*, bfloat16, SmolLM2": "arithmetic: three queries share a key; with one, a cache of bf16 is read at 0.96 and more",
    r"^norms.*: softmax backward,": "not known: on family 26 JAX's step to a program, 60 to 80 us after others",
    r"^overhead: .*TVM-FFI": "a DLTensor is made for each operand of its convention, and none for an ffi_call",
}
# By what the name of a processor has in it.
_OF_PROCESSOR: Mapping[str, Mapping[str, str]] = {
    "family 26, model 2": _EPYC_26,
    "family 25, model 17": _EPYC_25,
    "family 6, model 207": _XEON_207,
    "family 6, model 167": _XEON_167,
}


def limit_of(cpu: str, suite: str, case: str, goal: str) -> str | None:
    """Return what limits a goal on a processor, if there is something to say. A suite may have its threads in it."""
    text = f"{suite}: {case}: {goal}"
    of_it = next((limits for name, limits in _OF_PROCESSOR.items() if f"({name})" in cpu), {})
    matches = (limit for limits in (of_it, _ANYWHERE) for pattern, limit in limits.items() if re.search(pattern, text))
    return next(matches, None)
