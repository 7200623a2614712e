"""The table of docs/patching.md: the patches on Megatron, which depend on the code alone."""

from __future__ import annotations

import sys

import megatron_ext

sys.stdout.write("| patch | target | kind | releases | reason |\n|---|---|---|---|---|\n")
for row in megatron_ext.report():
    if not row.target.startswith("torch"):  # those depend on the device
        cells = f"`{row.id}` | `{row.target}` | {row.kind} | {row.releases} | {row.reason}"
        sys.stdout.write(f"| {cells} |\n")
