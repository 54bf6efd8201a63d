"""The calls of exported programs, and which of their callees this process has."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from ..handles import import_exported, is_registered


# The attribute of custom calls, by the convention of their version 4.
_ATTRIBUTES = "mhlo.backend_config"


def bring_back(module: bytes, platforms: Sequence[str], load_code: Callable[[str, str], None]) -> list[str]:
    """Import the Python kernels of a serialized program for `platforms`.

    **Arguments:** `load_code` is called with a target and the machine code that a call of it brings along.

    **Returns:** the targets that nobody has registered, of those that are this package's own affair.
    """
    targets: dict[str, None] = {}
    codes: list[tuple[str, str]] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = operation.attributes["call_target_name"].value
            attributes = None
            if _ATTRIBUTES in operation.attributes:  # older bindings have no `get`
                attributes = operation.attributes[_ATTRIBUTES]
            if isinstance(attributes, ir.DictAttr) and "portable" in attributes:
                portable: Any = attributes["portable"]
                import_exported(portable.value)
            if isinstance(attributes, ir.DictAttr) and "eqxcallback_code" in attributes:
                code: Any = attributes["eqxcallback_code"]
                codes.append((target, code.value))
            if target.startswith("eqxcallback_"):
                targets[target] = None
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context() as context:
        stablehlo.deserialize_portable_artifact(context, module).operation.walk(visit)
    for target, code in codes:
        if code:  # other C functions have none
            load_code(target, code)
    return [target for target in targets if not any(is_registered(target, platform) for platform in platforms)]
