"""Runs calls in a process that has loaded the sanitizer first: `python run_sanitized.py LIBRARY CALLS`."""

import ctypes
import pathlib
import pickle
import sys

import running


if __name__ == "__main__":
    library, calls = sys.argv[1:]
    index_of, described = pickle.loads(pathlib.Path(calls).read_bytes())
    for launches, fields in described:
        call = running.Call(launches=[running.Launch(*launch) for launch in launches], **fields)
        running.run(ctypes.CDLL(library), index_of, call, seed=1, guarded=False)
    print("clean")
