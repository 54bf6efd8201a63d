"""Say what to do where the extension is missing: in a checkout, Python finds the sources before what is installed."""

import importlib.util
import pathlib


if importlib.util.find_spec("._ext", __package__) is None:
    folder = pathlib.Path(__file__).parents[1]
    raise ImportError(
        f"{__package__}: expected its extension module, _ext; got the sources in {folder}, which are not built. If it is "
        "installed, start Python in another folder, or with -P. If not, run `pip install .` there."
    )
