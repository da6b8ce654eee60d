"""The entry point: `python -m kvplug.sim.engine`. See `--help`, or docs/simulation.md."""

import asyncio
import logging
import sys

from kvplug.errors import KvplugError


def main() -> int:
    """Serve one simulated engine; returns the exit code."""
    try:
        from kvplug.sim.engine_config import parse
        from kvplug.sim.engine_service import serve
        from kvplug.sim.tokenizer import FolderTokenizer
    except ModuleNotFoundError as error:
        sys.stderr.write(f"a simulated engine needs {error.name!r}: pip install 'kvplug[router]'\n")
        return 1
    config, log_level = parse()
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        tokenizer = None
        if config.tokenizer is not None:
            # As a router in front of it tokenizes; not loaded where bytes are tokens.
            from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

            prompts = PromptTokenizer.from_folder(config.tokenizer)
            tokenizer = FolderTokenizer(prompts, config.tokenizer)
        asyncio.run(serve(config, tokenizer))
    except KvplugError as error:
        sys.stderr.write(f"kvplug.sim.engine: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
