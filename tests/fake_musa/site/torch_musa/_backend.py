"""Loads the compiled backend and names it; must be imported before all other modules here."""

import os
import sys

import torch

torch.utils.rename_privateuse1_backend("musa")
torch.ops.load_library(os.environ["FAKE_MUSA_LIBRARY"])
torch._register_device_module("musa", sys.modules["torch_musa"])
torch.version.musa = "40300"
