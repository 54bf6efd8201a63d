"""Somebody's model with our layers in place of Equinox's."""

from ._fuse import fuse as fuse, unfuse as unfuse
from ._report import Change as Change, Fused as Fused, FusionReport as FusionReport
from ._rules import FuseRule as FuseRule
