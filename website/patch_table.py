"""Prints docs/reference/patches.md: the patches on Megatron, which depend only on the code."""

from __future__ import annotations

import sys

import megatron_ext

HEAD = """# Every patch on Megatron

<!-- Generated: python website/patch_table.py > docs/reference/patches.md -->

[How Megatron is patched](../patching.md) explains the columns. `megatron-ext patches list` prints
this table for the installed release. `--all` adds the torch functions that a device redirects.

"""

sys.stdout.write(HEAD)
sys.stdout.write(
    "| patch | target | kind | releases | reason |\n|---|---|---|---|---|\n"
)
for row in megatron_ext.report():
    if not row.target.startswith("torch"):  # those depend on the device
        cells = (
            f"`{row.id}` | `{row.target}` | {row.kind} | {row.releases} | {row.reason}"
        )
        sys.stdout.write(f"| {cells} |\n")
