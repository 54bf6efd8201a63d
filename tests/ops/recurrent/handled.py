"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

from ..handled import a, needs, present


HANDLED = {
    "lstm_gates": ([a(2, 12), a(2, 3)], [a(2, 3), a(2, 3)], {}),
    "gru_gates": ([a(2, 9), a(2, 9), a(2, 3), a(3)], a(2, 3), present(0, 1, 2, 3)),
    "gru_gates, plain": ([a(2, 9), a(2, 9), a(2, 3)], a(2, 3), present(0, 1, 2)),
    "lstm_gates_backward": (
        [a(2, 12), *[a(2, 3)] * 5],
        [a(2, 12), a(2, 3)],
        needs((0, 1), (0, 1)),
    ),
    "lstm_gates_backward, of cell": ([a(2, 12), *[a(2, 3)] * 5], a(2, 3), needs((0, 1), (1,))),
    "gru_gates_backward": (
        [a(2, 9), a(2, 9), a(2, 3), a(3), a(2, 3), a(2, 3)],
        [a(2, 9), a(2, 9), a(2, 3), a(3)],
        needs((0, 1, 2, 3), (0, 1, 2, 3)),
    ),
    "gru_gates_backward, of hidden": ([a(2, 9), a(2, 9), *[a(2, 3)] * 3], a(2, 3), needs((0, 1, 2), (2,))),
}
NOT_HANDLED = [
    ("lstm_gates", [a(2, 12), a(2, 4)], [a(2, 4), a(2, 4)], {}, r"gates of shape \(\*batch, 4 \* size\)"),
    ("lstm_gates", [a(2, 12), a(2, 3)], [a(2, 3), a(2, 4)], {}, r"results of the type of cell"),
    ("gru_gates", [a(2, 9), a(2, 6), a(2, 3)], a(2, 3), present(0, 1, 2), r"gates of shape \(\*batch, 3 \* size\)"),
    ("gru_gates", [a(2, 9), a(2, 9), a(2, 3)], a(2, 4), present(0, 1, 2), r"a result of the type of hidden"),
    (
        "gru_gates",
        [a(2, 9), a(2, 9), a(2, 3), a(2)],
        a(2, 3),
        present(0, 1, 2, 3),
        r"a bias of shape \(3,\); got \(2\)",
    ),
    (
        "lstm_gates_backward",
        [a(2, 12), *[a(2, 3)] * 4, a(2, 4)],
        a(2, 3),
        needs((0, 1), (1,)),
        r"cotangents of the type of cell",
    ),
    (
        "lstm_gates_backward",
        [a(2, 9), *[a(2, 3)] * 5],
        a(2, 3),
        needs((0, 1), (1,)),
        r"gates of shape \(\*batch, 4 \* size\)",
    ),
    (
        "gru_gates_backward",
        [a(2, 9), a(2, 9), *[a(2, 3)] * 2, a(2, 4)],
        a(2, 3),
        needs((0, 1, 2), (2,)),
        r"a cotangent of the type of hidden",
    ),
]
