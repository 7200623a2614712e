"""The musa backend's answers and refusals, without a device; `test_musa_emulated` has the rest."""

import argparse
import logging

import pytest

from megatron_ext.devices import musa
from megatron_ext.devices.musa import MusaDevice


def test_missing_names_what_to_install():
    assert "torch_musa" in MusaDevice().missing()


def test_argument_defaults_need_no_transformer_engine():
    defaults = {
        dest: value for dest, (value, _) in MusaDevice().argument_defaults.items()
    }
    assert defaults["transformer_impl"] == "local"
    assert defaults["distributed_backend"] == "mccl"
    assert "enable_gloo_process_groups" not in defaults  # groups for host tensors stay


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"moe_grouped_gemm": True}, "--moe-grouped-gemm"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"profile": True}, "--profile"),
        ({"use_megatron_fsdp": True}, "fsdp"),
    ],
)
def test_arguments_that_need_nvidia_are_refused(arguments, flag):
    (message,) = MusaDevice().argument_errors(argparse.Namespace(**arguments))
    assert flag in message


def test_plain_arguments_are_accepted():
    arguments = argparse.Namespace(
        tensor_model_parallel_size=2, overlap_p2p_comm_warmup_flush=True
    )
    assert MusaDevice().argument_errors(arguments) == []


def test_who_redirects_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(musa, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert musa._torchada() is None
    assert "redirected by megatron_ext" in caplog.text
