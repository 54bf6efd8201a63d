"""The reader of XLA's plans, on pieces of plans of JAX 0.10.2, 0.11.2 and 0.12.0.1, which write them alike."""

from eqxcallback.inspection._thunks import parse


# A loop with a loop in it, and a branch in the inner one. What is cut from the lines is `grid: [...] threads: [...]`.
NESTED = """\
000: kCommandBuffer [source       | next=003 (1)]\x20
    001: kCopy [source | sink] kCopy
003: kWhile         [prev=000 (1) | sink        ]  \x20
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion_1
  body:
    000: kCommandBuffer [source       | next=007 (1)]\x20
        005: kCopy         [source | sink] kCopy
        006: kCustomKernel [source | sink] loop_add_fusion_1
    007: kWhile         [prev=000 (1) | next=012 (1)]      \x20
condition:
        008: kCustomKernel [source | sink] loop_compare_fusion
      body:
        009: kConditional  [prev=007 (1) | next=011 (1)]          \x20
          false_branch:
            010: kCustomCall [source | sink] kCustomCall
          true_branch:
            011: kDynamicSliceFusion [source | sink] params=1, results=1
                012: kCopy [source | sink] kCopy
    013: kCustomCall [prev=007 (1) | sink        ] kCustomCall

"""

NAMES = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer_1"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
  }
  thunk_kind: "kSequential"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "buffer_callback.1"
    thunk_id: 10
  }
  thunk_kind: "kCustomCall"
}
"""


def tree(thunks):
    return [(thunk.number, thunk.branch, *tree(thunk.nested)) for thunk in thunks]


def test_the_tree():
    assert tree(parse(NESTED)) == [
        (0, "", (1, "")),
        (
            3,
            "",
            (4, "condition"),
            (0, "body", (5, ""), (6, "")),
            (
                7,
                "body",
                (8, "condition"),
                (9, "body", (10, "false_branch"), (11, "true_branch", (12, ""))),
            ),
            (13, "body"),
        ),
    ]


def test_kinds_and_names():
    thunks = {thunk.number: thunk for outer in parse(NESTED, NAMES) for thunk in outer}
    assert (thunks[10].kind, thunks[10].name) == ("kCustomCall", "buffer_callback.1")
    assert (thunks[13].kind, thunks[13].name) == ("kCustomCall", "")
    assert [thunk.kind for thunk in thunks[10].above] == ["kConditional", "kWhile", "kWhile"]


def test_what_is_recorded():
    copy, other = (next(t for outer in parse(NESTED) for t in outer if t.number == number) for number in (5, 10))
    assert copy.buffer is not None
    assert copy.buffer.branch == "body"
    assert other.buffer is None


def test_what_nobody_knows():
    text = """\
A header.
000: kSomethingNew [source | sink] with {braces} and words
    001: kCustomCall [source | sink] kCustomCall
      a line of another kind
002: kCustomCall
"""
    assert [(thunk.kind, len(thunk.nested)) for thunk in parse(text)] == [("kSomethingNew", 1), ("kCustomCall", 0)]
    assert parse("") == []


def test_empty_branches():
    text = """\
000: kWhile [source | sink]
condition:
    001: kCustomKernel [source | sink] a
  body:
    002: kConditional [source | sink]
          false_branch:
            003: kCopy [source | sink] kCopy
          true_branch:
    004: kCopy [source | sink] kCopy
"""
    assert tree(parse(text)) == [(0, "", (1, "condition"), (2, "body", (3, "false_branch")), (4, "body"))]
