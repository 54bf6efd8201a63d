"""The conformance harness for authors of kernels."""

from ._check import check as check
from ._emulated import emulated as emulated
from ._report import CheckFailed as CheckFailed, Report as Report
