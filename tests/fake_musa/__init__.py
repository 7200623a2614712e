"""An emulated MUSA device for tests: a C++ backend over host memory and a stand-in `torch_musa`.

`csrc/` is built by `build.library` on first use; `site/` is what a process needs on its
`PYTHONPATH` (see `build.environment`) to find a `torch_musa` that `import torch` loads by itself.
"""
