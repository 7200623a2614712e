"""Loads the compiled backend and gives it its name; everything else here needs that first."""

import os
import sys

import torch

torch.utils.rename_privateuse1_backend("musa")
torch.ops.load_library(os.environ["FAKE_MUSA_LIBRARY"])
torch._register_device_module("musa", sys.modules["torch_musa"])
torch.version.musa = "40300"
