"""An emulated MUSA device for tests: a C++ backend over host memory and a stand-in `torch_musa`.

`build.library` builds `csrc/` on first use. A process with `site/` on its `PYTHONPATH` (see
`build.environment`) finds a `torch_musa` that `import torch` loads automatically.
"""
