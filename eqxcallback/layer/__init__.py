"""Your kernel as an Equinox layer."""

from ._layer import Layer as Layer
