"""Measurements: peers interleaved in one process, medians and ratios. Nothing here is asserted in a test."""
