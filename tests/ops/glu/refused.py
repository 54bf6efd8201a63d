"""The calls that the functions refuse, and what they say."""

from eqxcallback import ops

from ..zeros import bf16, f32, i32


REFUSED = [
    (lambda: ops.swiglu(f32()), r"swiglu: expected gate with at least one axis"),
    (
        lambda: ops.swiglu(f32(2, 3)),
        r"swiglu: expected an even last axis of gate, which holds both halves; got gate",
    ),
    (lambda: ops.swiglu(i32(4)), r"swiglu: expected gate of one floating dtype"),
    (lambda: ops.swiglu(f32(2, 3), f32(3)), r"swiglu: expected gate and up of one shape; got .*up: float32\[3\]"),
    (lambda: ops.gelu(i32(4)), r"gelu: expected x of one floating dtype; got .*int32\[4\]"),
    (
        lambda: ops.swiglu(f32(3), bf16(3)),
        r"swiglu: expected gate, up of one floating dtype; got .*up: bfloat16\[3\]",
    ),
]
