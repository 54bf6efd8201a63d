"""Runs pytest on a sanitized build: `python run_sanitized.py FOLDER ARGUMENTS...`, FOLDER being its unpacked wheel."""

import sys

import pytest


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    # An editable install finds the package before any folder does.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", "."))]
    code = pytest.main(arguments)
    where = str(sys.modules["eqxcallback"].__file__)
    assert where.startswith(folder), f"the tests ran on another build: {where}"
    sys.exit(code)
