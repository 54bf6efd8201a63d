"""What an op is under JAX's transformations. Knows no platform."""

from ._axes import Axes as Axes
from ._batching import METHODS as METHODS
from ._bodies import Backward as Backward, Body as Body
from ._call import Call as Call
from ._choice import IMPLEMENTATIONS as IMPLEMENTATIONS, Implementation as Implementation
from ._definition import Definition as Definition, differentiable as differentiable
from ._op import Op as Op
from ._options import Options as Options
from ._sharding import parse_sharding as parse_sharding
from ._structure import Structure as Structure, check_typed as check_typed, is_array as is_array, typed as typed
