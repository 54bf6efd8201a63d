"""The options of programs that run on several devices, of one process or of several."""

import argparse
import re

from .._program import Parser


def add_devices(group: argparse._ArgumentGroup, split: str) -> None:
    """Add all of them. `split` is what the devices share, as in "the model"."""
    group.add_argument("--devices", type=int, default=1, help=f"of each process; they share {split} (default: 1)")
    add_processes(group)


def add_processes(group: argparse._ArgumentGroup) -> None:
    """Add those that say which processes there are."""
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 listens, if there are several processes"
    )
    group.add_argument("--processes", type=int, default=1, help="how many there are (default: 1)")
    group.add_argument("--process", type=int, default=0, help="which one this is (default: 0, which has the results)")


def check_devices(parser: Parser, options: argparse.Namespace) -> None:
    """Raise `UsageError` if they do not fit each other."""
    several = options.processes > 1
    address = re.fullmatch("[!-~]+:([0-9]{1,5})", options.coordinator or "")
    has_port = address is not None and int(address[1]) < 2**16
    rules = [
        (options.devices >= 1, "--devices of 1 or more", options.devices),
        (options.processes >= 1, "--processes of 1 or more", options.processes),
        (0 <= options.process < options.processes, f"--process from 0 to {options.processes - 1}", options.process),
        (several == (options.coordinator is not None), "--coordinator and --processes together", "one of them"),
        (has_port or not several, "--coordinator HOST:PORT", options.coordinator),
    ]
    for holds, expected, got in rules:
        if not holds:
            parser.error(f"expected {expected}; got {got}")
