"""On PYTHONPATH, this gives every rank of this machine the first GPU, whose index LOCAL_RANK is."""

import os

if "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ:
    os.environ["LOCAL_RANK"] = "0"
