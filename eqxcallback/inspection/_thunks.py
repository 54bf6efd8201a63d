"""XLA's plan for a GPU: a tree of thunks, the steps that its runtime takes, read from the text that XLA writes of it."""

import dataclasses
import re
from collections.abc import Iterator


@dataclasses.dataclass(eq=False)
class Thunk:
    """**Attributes:**

    - `kind`: in XLA's spelling, such as `"kCustomCall"`, also if nobody here knows it.
    - `number`: what the plan calls it. Command buffers are all 0.
    - `name`: of the instruction that it is of, or `""`.
    - `branch`: which part of its parent it is in: `"body"`, `"condition"`, `"branch_0"`, or `""`.
    - `nested`: what it runs, in order.
    """

    kind: str
    number: int
    name: str = ""
    branch: str = ""
    parent: "Thunk | None" = dataclasses.field(default=None, repr=False)
    nested: list["Thunk"] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator["Thunk"]:
        """Itself and all inside."""
        yield self
        for thunk in self.nested:
            yield from thunk

    @property
    def above(self) -> Iterator["Thunk"]:
        """Yield the thunks around this one, from its parent outwards."""
        thunk = self.parent
        while thunk is not None:
            yield thunk
            thunk = thunk.parent

    @property
    def buffer(self) -> "Thunk | None":
        """The command buffer that it is recorded into."""
        return next((thunk for thunk in self.above if thunk.kind == "kCommandBuffer"), None)


# `003: kWhile [prev=000 (1) | sink] ...`, below which there may be `body:` and deeper lines.
_THUNK = re.compile(r"( *)(\d+): (k\w+)")
_BRANCH = re.compile(r"( *)(\w+):\s*$")


def parse(sequence: str, names: str = "") -> list[Thunk]:
    """The outermost thunks of a plan. Lines of no known form are left out.

    **Arguments:**

    - `sequence`: the text of the plan, in which lines that are deeper belong to the one above.
    - `names`: the text that has the instruction of each number.
    """
    named = _names(names)
    top: list[Thunk] = []
    open_: list[tuple[int, Thunk]] = []  # with their depths
    branches: dict[Thunk | None, str] = {}
    label, indent = "", 0
    for line in sequence.splitlines():
        if (match := _BRANCH.match(line)) is not None:
            label, indent = match[2], len(match[1])  # that of a condition is not indented
        elif (match := _THUNK.match(line)) is not None:
            depth = len(match[1])
            while open_ and open_[-1][0] >= depth:
                open_.pop()
            parent = open_[-1][1] if open_ else None
            if label and indent < depth:  # or it was of an empty branch
                branches[parent] = label
            label = ""
            number = int(match[2])
            thunk = Thunk(match[3], number, named.get(number, ""), branches.get(parent, ""), parent)
            (top if parent is None else parent.nested).append(thunk)
            open_.append((depth, thunk))
    return top


def _names(text: str) -> dict[int, str]:
    names = {}
    for block in text.split("thunk_metadata {")[1:]:
        number = re.search(r"thunk_id: (\d+)", block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if number is not None and name is not None:
            names[int(number[1])] = name[1]
    return names
