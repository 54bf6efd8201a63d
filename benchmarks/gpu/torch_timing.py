"""PyTorch's time on the device, counted as XLA's is: short calls are many in one CUDA graph."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._timing import Runner
from .repeated import CACHE_BYTES, Repeats
from .timing import HOST_SECONDS, Timed, most_programs


# The waiting is in cycles of a clock that is not asked for: no GPU's is higher.
_CYCLES_A_SECOND = 2e9


def torch_runner(make: Callable[[Sequence[Any]], Callable[[], Any]], args: Sequence[Any]) -> Runner:
    """`make` returns a call of PyTorch's on arrays of JAX, whose memory its tensors share."""
    torch: Any = importlib.import_module("torch")
    call = make(args)
    seconds = functools.partial(_seconds, torch)

    @functools.cache
    def timed() -> Timed:
        call()
        once = seconds(call, 3, ahead=True) / 3
        repeats = Repeats(cache_bytes=_cache_bytes(torch))
        if once >= repeats.below:
            return Timed(call)
        calls = repeats.calls(once)
        sets = [make(given) for given in jax.block_until_ready(repeats.operand_sets(args, calls))]
        try:
            replay = _captured(torch, sets, calls)
            seconds(replay, 1, ahead=True)
            return Timed(replay, calls, most_programs())
        except Exception as error:  # whatever PyTorch raises for what a graph cannot have
            print(f"PyTorch's CUDA graph: {type(error).__name__}: {str(error)[:300]}; timed one by one", flush=True)
            return Timed(call, most=most_programs())

    return Runner(lambda count: timed().run(seconds, count), call)


def _cache_bytes(torch: Any) -> int:
    return getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", CACHE_BYTES)


def _captured(torch: Any, sets: Sequence[Callable[[], Any]], calls: int) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks for: what is made at a first call must not be recorded
        for call in sets:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Threads of XLA may do what a thread that records may not.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls):
            sets[i % len(sets)]()

    def replay(kept: Any = sets) -> None:  # the graph has addresses alone
        graph.replay()

    return replay


def _seconds(torch: Any, call: Callable[[], Any], count: int, *, ahead: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait = HOST_SECONDS * count if ahead else 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(wait * _CYCLES_A_SECOND))
        start.record()
        for _ in range(count):
            call()
        end.record()
        is_late = start.query()
        torch.cuda.synchronize()
        if not (ahead and is_late):
            break
        wait *= 2
    return start.elapsed_time(end) / 1e3
