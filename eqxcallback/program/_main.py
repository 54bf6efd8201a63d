"""`python -m eqxcallback`: its commands."""

import argparse
import pathlib
from collections.abc import Sequence

from ._doctor import doctor
from ._new_kernel import KINDS, new_kernel


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m eqxcallback", description="Kernels of your own as Equinox layers.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "show what is installed, which kernels can run, and whether they do"
    commands.add_parser("doctor", help=about, description=about.capitalize() + ".")
    about = "write a package around one kernel: layer, reference, test, benchmark, README"
    scaffold = commands.add_parser("new-kernel", help=about, description=about.capitalize() + ".")
    scaffold.add_argument("name", metavar="NAME", help="of the package, such as my_kernel")
    scaffold.add_argument("--kind", choices=KINDS, required=True, help="what the kernel is written in")
    scaffold.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where it goes (default: NAME)")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return 0 if doctor() else 1
    folder = options.out or pathlib.Path(options.name)
    try:
        for path in new_kernel(options.name, options.kind, folder):
            print(path)
    except ValueError as error:
        scaffold.exit(2, f"new-kernel: {error}\n")
    print(f"\nNext: cd {folder} && pip install -e '.[test]' && pytest")
    return 0
