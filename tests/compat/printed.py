"""Printed texts, and a function that prints."""

import textwrap

from eqxcallback.compat import host_callback as hcb


class Stream:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def expect(self, text):
        hcb.barrier_wait()
        lines = [line.strip() for line in self.text.splitlines()]
        assert lines == [line.strip() for line in textwrap.dedent(text).strip().splitlines()]
        self.text = ""


def fun1(a, show):
    y = show(a * 2.0, what="a * 2")
    y = show(y * 3.0, what="y * 3", result=y)
    return y**2
