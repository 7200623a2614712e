"""The modules that the fork server imports once for all workers."""

import warnings

with warnings.catch_warnings():
    # megatron.core tells about absent accelerators when imported; no tokenizer needs one.
    warnings.simplefilter("ignore")
    import megatron.core.datasets.indexed_dataset
    import megatron.core.tokenizers.text.libraries  # noqa: F401

import megatron_ext.preprocess.encode  # noqa: F401
