"""The command line: ``python -m gdn_multi COMMAND``.

A command is one module with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code), and one line in
``COMMANDS``. Its module is imported when the command is given, so one command's imports never cost another.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "doctor": Command("gdn_multi.cli.doctor", "what this machine has, which backends are usable, what the others need"),
    "demo": Command("gdn_multi.cli.demo", "serve text files through a small GDN layer and one paged state pool"),
    "build": Command("gdn_multi.cli.build", "build the native CUDA backend ahead of time"),
    "compare": Command("gdn_multi.cli.compare", "run calls on every usable backend and against the reference"),
    "bench": Command("gdn_multi.cli.bench", "measure the backends and installed peers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m gdn_multi",
        description="Gated Delta-Rule prefill and decode on a paged recurrent-state cache.",
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    run = None
    for name, command in COMMANDS.items():
        description = command.help[0].upper() + command.help[1:]
        subparser = subparsers.add_parser(name, help=command.help, description=description)
        if name == chosen:
            try:
                module = importlib.import_module(command.module)
            except ImportError as error:
                print(f"python -m gdn_multi {name}: not available in this installation: {error}", file=sys.stderr)
                return 2
            module.add_arguments(subparser)
            run = module.run
    args = parser.parse_args(argv)
    assert run is not None  # parse_args has exited when no command of the table was given
    try:
        return run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own flush at exit is quiet
        return 1


def _version() -> str:
    from gdn_multi import __version__

    return f"gdn_multi {__version__}"
