"""What an op is under JAX's transformations. Knows no platform."""

from ._op import Op as Op
