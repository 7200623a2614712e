"""`python -m megatron_ext SCRIPT.py FLAGS...`, or any subcommand of `megatron-ext`."""

from __future__ import annotations

import sys

from megatron_ext import cli


def main() -> int:
    """Run a script or a subcommand, depending on the first argument."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].endswith(".py"):
        return _record(arguments[0], arguments[1:])
    return cli.main(arguments)


def _record(script: str, argv: list[str]) -> int:
    """Run a script so that torchrun can show which rank failed first and how."""
    # Without wrapt, `import megatron_ext` armed no patches, so report the problem
    # instead of training.
    try:
        import wrapt  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"megatron_ext: error: {cli.lacking(error)}", file=sys.stderr)
        return 2
    from megatron_ext.training import runner
    from megatron_ext.upstream import parent

    # Both calls do nothing unless `megatron-ext launch` started this process.
    parent.die_with_parent()
    parent.use_sockets_folder()
    from torch.distributed.elastic.multiprocessing.errors import record

    from megatron_ext.upstream.error_file import WholeErrorFile

    run = record(runner.run, WholeErrorFile())
    return run(script, argv) or 0


if __name__ == "__main__":
    sys.exit(main())
