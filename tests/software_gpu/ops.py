"""Ops with their GPU kernels on the CPU."""

import dataclasses
from typing import Any

import eqxcallback as eqxc


def on_software_gpu(op: eqxc.Op) -> eqxc.Op:
    """`op` with its kernels for CUDA in place of those for the CPU."""
    backward: Any = op.backward
    if isinstance(backward, dict):
        backward = {"cpu": backward["cuda"]} if "cuda" in backward else None
    return dataclasses.replace(op, kernels={"cpu": op.kernels["cuda"]}, backward=backward)
