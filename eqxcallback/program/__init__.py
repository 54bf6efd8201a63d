"""Whole programs: kept for another process, recorded into command buffers, and the programs of `python -m eqxcallback`."""

from ._export import PLATFORMS as PLATFORMS, export as export
from ._huge_pages import use_huge_pages as use_huge_pages
from ._jit_captured import JitCaptured as JitCaptured, jit_captured as jit_captured
from ._load import load as load
from ._main import main as main
from ._tune import Tuned as Tuned, tune as tune
