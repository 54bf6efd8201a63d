"""Whole programs: kept for another process, recorded into command buffers, and the one that examines the machine."""

from ._doctor import main as main
from ._export import export as export
from ._jit_captured import JitCaptured as JitCaptured, jit_captured as jit_captured
from ._load import load as load
from ._tune import Tuned as Tuned, tune as tune
