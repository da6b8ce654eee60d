"""Users for nats-server: what each engine, router and operator of a fleet may do, by nkey.

    python examples/nats_permissions.py --engine UA1=http://10.0.0.7:8000 \
        --engine UA2=http://10.0.0.8:8000,http://10.0.0.9:8000 --router UA3=a --operator UA4

The output is the `authorization` block of the server's configuration. UA1 stands for a public nkey;
its seed is the file of --nats-nkey-file, or $KVPLUG_NATS_NKEY_FILE of an engine.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from kvplug.nats import permissions
from kvplug.nats.permissions import MAX_RESPONSES, RESPONSE_LIMIT_S, Permissions
from kvplug.nats.subjects import Subjects


def main(argv: Sequence[str] | None = None) -> None:
    """Write the block."""
    arguments = _parser().parse_args(argv)
    subjects = Subjects(arguments.fleet)
    users = [
        *((key, permissions.of_publisher(subjects, names)) for key, names in arguments.engine),
        *((key, permissions.of_router(subjects, names[0])) for key, names in arguments.router),
        *((key, permissions.of_operator()) for key in arguments.operator),
    ]
    sys.stdout.write(authorization(users))


def authorization(users: Iterable[tuple[str, Permissions]]) -> str:
    """Of public nkeys and what each may do, as nats-server reads it."""
    lines = ",\n".join(f"    {_user(key, allowed)}" for key, allowed in users)
    return f"authorization {{\n  users: [\n{lines}\n  ]\n}}\n"


def _user(key: str, allowed: Permissions) -> str:
    parts = [
        f"publish: {{ allow: {json.dumps(allowed.publish)} }}",
        f"subscribe: {{ allow: {json.dumps(allowed.subscribe)} }}",
    ]
    if allowed.answers:
        parts.append(f'allow_responses: {{ max: {MAX_RESPONSES}, expires: "{RESPONSE_LIMIT_S}s" }}')
    return f"{{ nkey: {key}, permissions: {{ {', '.join(parts)} }} }}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Users for nats-server, by nkey.")
    parser.add_argument("--fleet", default="default", help="as --nats-fleet of the router")
    for flag, form, text in (
        ("--engine", "KEY=WORKER[,WORKER...]", "an engine, or a forwarder: its workers' URLs"),
        ("--router", "KEY=ID", "a router: its --router-id"),
    ):
        parser.add_argument(
            flag, type=_pair, action="append", default=[], metavar=form, help=text
        )  # fmt: skip
    text = "who makes the streams"
    parser.add_argument("--operator", action="append", default=[], metavar="KEY", help=text)
    return parser


def _pair(text: str) -> tuple[str, list[str]]:
    key, equals, names = text.partition("=")
    if not (key.startswith("U") and equals and names):
        raise argparse.ArgumentTypeError(f"expected KEY=NAME, got {text!r}")
    return key, [name.rstrip("/") for name in names.split(",")]


if __name__ == "__main__":
    main()
