"""The entry point: `kvplug router`, `kvplug doctor` and `kvplug compile`; without the script,
`python -m kvplug.router`, `... doctor` and `... compile`. See `--help`, or docs/settings.md.
"""

import gc
import os
import signal
import sys

from kvplug.errors import KvplugError

_USAGE = """usage: kvplug router ...    serve (kvplug router --help)
       kvplug doctor ...    what is misconfigured in a fleet
       kvplug compile       compile the kernels for an image
"""


def command() -> int:
    """`kvplug`: what it is to do comes first; returns the exit code."""
    if sys.argv[1:2] == ["router"]:
        return main(sys.argv[2:])
    if sys.argv[1:2] in (["doctor"], ["compile"]):
        return main(sys.argv[1:])
    sys.stderr.write(_USAGE)
    return 0 if sys.argv[1:2] in (["--help"], ["-h"]) else 2


def main(argv: list[str]) -> int:
    """Run the standalone router, ask a running one how it is, or compile its kernels; returns the
    exit code.
    """
    is_doctor, is_compiler = (argv[:1] == [name] for name in ("doctor", "compile"))
    if not is_doctor:
        _leave_on_signals()
    if is_compiler:
        from kvplug.server import compilation  # which needs nothing besides the library

        return compilation.main(argv[1:])
    try:
        import uvloop

        from kvplug.server.cli import parse
        from kvplug.server.compilation import compile_kernels
        from kvplug.server.diagnosis import doctor
        from kvplug.server.observability import request_log
        from kvplug.server.service import serve
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"the standalone router needs {error.name!r}: pip install 'kvplug[router]'\n"
        )
        return 1
    if is_doctor:
        return doctor.main(argv[1:])
    config, log_level = parse(argv, environ=os.environ)
    request_log.configure(config.log_format, log_level, logs_requests=config.log_requests)
    compile_kernels()  # before the first request and the first event, not during them
    gc.freeze()  # what is there now stays: to look through it again stops all streams for 80 ms
    try:
        if config.processes > 1:
            from kvplug.server.processes.supervisor import Supervisor

            return Supervisor(config).run()
        uvloop.run(serve(config))
    except KvplugError as error:
        sys.stderr.write(f"kvplug.router: {error}\n")
        return 1
    return 0


def _leave_on_signals() -> None:
    """Until `serve` takes the signals over there is nothing to bring to an end.

    No exception could do it: LLVM calls back into Python while it compiles, and what is raised
    there is printed and forgotten.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
