"""The bytes of registers that each kernel of attention keeps on the stack, by Triton, and by the test that compiles the kernel.

The fewer the faster. A kernel that is not named here keeps none. Most tiles were chosen with 3.9; with 3.6, the oldest Triton
that is supported, some kernels keep more. Those of sm_90 that were measured are faster than tiles that keep none.
"""

SPILLED = {
    "3.6": {
        "test_forward[90-256-bfloat16]": 24,
        "test_forward[90-80-float32]": 8,
        "test_backward[rows-100-128-bfloat16]": 8,
        "test_backward[keys-90-64-bfloat16]": 496,
        "test_backward[keys-90-80-bfloat16]": 576,
        "test_backward[keys-90-128-bfloat16]": 792,
        "test_backward[keys-90-256-bfloat16]": 304,
        "test_backward[keys-100-128-bfloat16]": 936,
        "test_backward[keys-90-128-float32]": 64,
        "test_options[forward-90-128-has-window-soft_cap-dropout]": 152,
        "test_options[keys-90-128-has-window-soft_cap-dropout]": 184,
        "test_options[queries-90-128-has-window-soft_cap-dropout]": 40,
        "test_options[bias-90-128-has-window-soft_cap-dropout]": 32,
        "test_options[keys-86-256-has-window-soft_cap-dropout]": 240,
        "test_options[queries-86-256-has-window-soft_cap-dropout]": 8,
        "test_options[keys-90-128-has]": 192,
        "test_options[forward-120-80-has]": 16,
        "test_options[keys-120-80-has]": 264,
        "test_options[bias-120-80-has]": 32,
        "test_options[keys-86-256-has-dtype0]": 32,
        "test_options[queries-86-256-has-dtype1]": 8,
    },
    "3.9": {
        "test_forward[90-256-bfloat16]": 96,
        "test_forward[100-256-bfloat16]": 32,
        "test_few_queries[90-128-float32-16]": 8,
        "test_backward[keys-90-64-bfloat16]": 96,
        "test_backward[keys-90-80-bfloat16]": 120,
        "test_backward[keys-90-128-bfloat16]": 416,
        "test_backward[keys-90-256-bfloat16]": 400,
        "test_backward[keys-100-128-bfloat16]": 392,
        "test_backward[keys-90-128-float32]": 48,
        "test_options[forward-90-128-has-window-soft_cap-dropout]": 240,
        "test_options[keys-90-128-has-window-soft_cap-dropout]": 256,
        "test_options[queries-90-128-has-window-soft_cap-dropout]": 168,
        "test_options[bias-90-128-has-window-soft_cap-dropout]": 120,
        "test_options[keys-86-256-has-window-soft_cap-dropout]": 168,
        "test_options[queries-86-256-has-window-soft_cap-dropout]": 32,
        "test_options[keys-90-128-has]": 88,
        "test_options[keys-120-80-has]": 112,
        "test_options[bias-120-80-has]": 32,
        "test_options[forward-90-128-window]": 88,
    },
}
