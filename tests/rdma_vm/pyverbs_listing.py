"""Prints the RDMA devices that pyverbs finds, as JSON. A script for a Python that has pyverbs.

pyverbs (Debian: python3-pyverbs) is rdma-core's own binding. It usually belongs to the system's
Python and not to the training environment, so this script imports nothing of this package.
"""

import json
import sys


def _describe_port(context, number):  # type: ignore[no-untyped-def]  # pyverbs has no types
    port = context.query_port(number)
    gids = {}
    for index in range(port.gid_tbl_len):
        text = str(context.query_gid(number, index)).split()[-1]
        if text.replace(":", "").strip("0"):
            gids[index] = text
    return {
        "active": port.state == 4,
        "lid": port.lid,
        "mtu": port.active_mtu,
        "gids": gids,
    }


def main() -> None:
    """Print {device: {port: {active, lid, mtu, gids}}}; {} on a host without RDMA."""
    from pyverbs.device import Context, get_device_list  # type: ignore[import-not-found]
    from pyverbs.pyverbs_error import PyverbsError  # type: ignore[import-not-found]

    listing = {}
    try:
        devices = get_device_list()
    except PyverbsError:
        devices = []
    for device in devices:
        name = device.name.decode()
        with Context(name=name) as context:
            num_ports = context.query_device().phys_port_cnt
            listing[name] = {
                i: _describe_port(context, i) for i in range(1, num_ports + 1)
            }
    json.dump(listing, sys.stdout)


if __name__ == "__main__":
    main()
