"""The layer of `examples/boundaries/streams.py`: Megatron's tree has a folder `examples` too."""

import runpy
from pathlib import Path

_EXAMPLE = Path(__file__).parents[2] / "examples" / "boundaries" / "streams.py"
LAYER = runpy.run_path(str(_EXAMPLE))["LAYER"]
