"""Machine code of Numba, as a text that a program carries to other processes."""

import base64
import dataclasses
import hashlib
import importlib
import json
import re
import threading
import zlib
from typing import Any

from .. import _ext


# Names in LLVM's language, and what is in them of this process: how many functions Numba had compiled before, and hashes.
_NAME = re.compile(r'[@$](?:"[^"]*"|[-\w.$]+)')
_COUNT = re.compile(r"B\d+v\d+B|(?<=__excinfo_unwrap_args)[0-9a-f]{40}|(?<=\.bytes\.)-?\d+")
# What would make the arguments of an exception, of which the wrapper says no more than that there was one. They call Python.
_UNWRAP = re.compile(r"^(define [^\n]*@__excinfo_unwrap_args\w+\([^\n]*\{\n).*?^\}$", re.MULTILINE | re.DOTALL)
_MESSAGE = re.compile(r'^(@"\.const\.missing Environment: [^"]*" = )[^\n]*$', re.MULTILINE)

_lock = threading.Lock()
_loaded: dict[int, Any] = {}  # engines of LLVM, which keep the code in memory


@dataclasses.dataclass(frozen=True)
class ObjectCode:
    """**Attributes:**

    - `data`: an object file.
    - `function`: the symbol in it.
    - `needs`: symbols that are elsewhere.
    - `processor`: what it was compiled for: features of processors, or the name of one.
    """

    data: bytes
    function: str
    needs: tuple[str, ...]
    processor: tuple[str, ...]

    @property
    def number(self) -> int:
        """The same for the same code in every process. Never zero."""
        digest = hashlib.blake2b(self.data + self.function.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    def text(self, op: str, symbol: str) -> str:
        """Write the code as text for `load`, with the op that calls it, for errors."""
        return json.dumps(
            {
                "op": op,
                "symbol": symbol,
                "numba": _version(),
                "function": self.function,
                "needs": self.needs,
                "processor": self.processor,
                "object": base64.b64encode(zlib.compress(self.data, 9)).decode(),
            }
        )

    def load(self) -> None:
        """Load the code, so that calls find it. The same code is in memory once."""
        with _lock:
            if self.number in _loaded:
                return
            llvm = _llvm()
            context = importlib.import_module("numba.core.registry").cpu_target.target_context
            importlib.import_module("numba.core.runtime").rtsys.initialize(context)  # what Numba's functions call
            if missing := [name for name in self.needs if llvm.address_of_symbol(name) is None]:
                raise ValueError(f"expected a process that has the function {missing[0]}; got one that lacks it")
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
            engine.add_object_file(llvm.ObjectFileRef.from_data(self.data))
            engine.finalize_object()
            _ext.set_loaded_code(self.number, engine.get_function_address(self.function))
            _loaded[self.number] = engine


def object_code(compiled: Any) -> ObjectCode | None:
    """Compile what `numba.cfunc` has made to object code. `None` if only this process can call it: it holds addresses, or Python.

    Numba's own object file would be another one in each process.
    """
    llvm = _llvm()
    counts: dict[str, int] = {}

    def renamed(text: str) -> str:
        return _COUNT.sub(lambda match: f"B0v{counts.setdefault(match[0], len(counts))}B", text)

    text = _UNWRAP.sub(r"\1  ret ptr null\n}", compiled.inspect_llvm())
    text = _MESSAGE.sub(r"\1internal constant [1 x i8] zeroinitializer", text)
    text = _NAME.sub(lambda match: renamed(match[0]), text)
    used = _used_names(text)
    if "inttoptr (i64 " in text or any(name.startswith("_ZN08NumbaEnv") for name in used):
        return None
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError:  # a name has other uses than we know of
        return None
    declared = {symbol.name for symbol in (*module.functions, *module.global_variables) if symbol.is_declaration}
    needs = tuple(sorted(name for name in declared & used if not name.startswith("llvm.")))
    if any(name.startswith(("Py", "_Py")) or llvm.address_of_symbol(name) is None for name in needs):
        return None
    return ObjectCode(_machine().emit_object(module), renamed(compiled.native_name), needs, _processor())


def _used_names(text: str) -> set[str]:
    """Names that the LLVM code refers to, beside where it declares or defines them."""
    lines = (line for line in text.splitlines() if not line.startswith("declare "))
    uses = (_NAME.sub("", line, count=1) if line.startswith(("@", "define ")) else line for line in lines)
    return {name[1:].strip('"') for line in uses for name in _NAME.findall(line)}


def load_object_code(text: str) -> tuple[str, str]:
    """Load what `ObjectCode.text` has made, in whatever process.

    **Returns:** the op, and the symbol.

    **Raises:** `ValueError` if it cannot run here.
    """
    said = json.loads(text)
    who = f"{said['op']}[numba]: the program has the machine code of {said['symbol']}"
    try:
        if said["numba"] != _version():
            raise ValueError(f"expected Numba {said['numba']}, which made it; got {_version()}")
        if lacking := sorted(set(said["processor"]) - _here()):
            raise ValueError(f"expected a processor with {', '.join(lacking)}; got one without")
        data = zlib.decompress(base64.b64decode(said["object"]))
        ObjectCode(data, said["function"], tuple(said["needs"]), tuple(said["processor"])).load()
    except ImportError as error:
        raise ValueError(f"{who}; it needs Numba here too: {error}. Install eqxcallback[numba].") from None
    except ValueError as error:
        raise ValueError(f"{who}: {error}. Export it on such a machine.") from None
    return said["op"], said["symbol"]


def _llvm() -> Any:
    return importlib.import_module("llvmlite.binding")


def _version() -> str:
    """Return the part of Numba's version that says what compiled code expects of Numba."""
    return ".".join(importlib.import_module("numba").__version__.split(".")[:2])


def _machine() -> Any:
    """Make a target machine as Numba does."""
    config, llvm = importlib.import_module("numba").config, _llvm()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=config.CPU_NAME or llvm.get_host_cpu_name(),
        features=_features(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def _features() -> str:
    """The features of processors that Numba compiles for, such as `+avx2,-sse4a`."""
    asked = importlib.import_module("numba").config.CPU_FEATURES
    return importlib.import_module("numba.core.codegen").get_host_cpu_features() if asked is None else asked


def _processor() -> tuple[str, ...]:
    """Return what a processor needs to run the code that Numba compiles now: features, or its name if Numba names none."""
    name = importlib.import_module("numba").config.CPU_NAME or _llvm().get_host_cpu_name()
    features = tuple(sorted(feature[1:] for feature in _features().split(",") if feature.startswith("+")))
    return features or (() if name == "generic" else (name,))


def _here() -> set[str]:
    """The features that this processor has, and its name."""
    llvm = _llvm()
    return {llvm.get_host_cpu_name(), *(name for name, has in llvm.get_host_cpu_features().items() if has)}
