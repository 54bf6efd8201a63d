"""Tools that every room may use: errors and warnings, sameness, aliases, checks. Imports nothing of ours."""

from ._aliases import (
    Aliases as Aliases,
    Leaf as Leaf,
    check_alias_pairs as check_alias_pairs,
    check_aliases as check_aliases,
    path_text as path_text,
    resolve_aliases as resolve_aliases,
    root_name as root_name,
)
from ._checks import (
    check as check,
    check_arrays as check_arrays,
    check_flags as check_flags,
    check_floats as check_floats,
    check_loss_options as check_loss_options,
    check_one_of as check_one_of,
    check_runs as check_runs,
    epsilon as epsilon,
    integer as integer,
    integers as integers,
    number as number,
    ref_text as ref_text,
    scale_of as scale_of,
    signature_of as signature_of,
    soft_cap_of as soft_cap_of,
)
from ._compilers import run_compiler as run_compiler
from ._errors import (
    Failures as Failures,
    KernelError as KernelError,
    blaming as blaming,
    callable_name as callable_name,
    from_the_user as from_the_user,
    raise_poisoned as raise_poisoned,
    raising as raising,
    record_failure as record_failure,
    record_poison as record_poison,
    type_text as type_text,
    types_text as types_text,
)
from ._identity import identity as identity
from ._native_errors import (
    keep_native as keep_native,
    record_native_error as record_native_error,
    reraise_native as reraise_native,
)
from ._own_callable import OwnCallable as OwnCallable
from ._statics import Memo as Memo, strict as strict, strict_statics as strict_statics
from ._types import (
    AnyArray as AnyArray,
    AnyBool as AnyBool,
    AnyInt as AnyInt,
    AnyNumber as AnyNumber,
    Aval as Aval,
    DType as DType,
    Keys as Keys,
    PyTree as PyTree,
    PyTreeDef as PyTreeDef,
    ShapeAndDtype as ShapeAndDtype,
    Size as Size,
    Types as Types,
    Value as Value,
)
from ._warnings import (
    PerformanceWarning as PerformanceWarning,
    is_quiet as is_quiet,
    quiet as quiet,
    warn as warn,
    warn_once as warn_once,
)
