"""The rows of SGLang 0.5.23: a server, and an oracle in it that tells which blocks each tier has.

In:  the name of a row.   Out: the recipe of its engine, and how it is asked.
"""

import http
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engines.plugged_sglang import (
    CPU_PLUGIN,
    HICACHE,
    WITHOUT_WEIGHTS,
    PluggedSglang,
    last_message,
    plugged_sglang,
)
from tests.exactness.engines import plainly, with_salts_and_resets
from tests.exactness.models import save_model
from tests.plugins.stock_client import wait_until


class SglangEngine(PluggedSglang):
    """To Followed and compare what LineEngine is."""

    name = "sglang"

    def wait_ready(self):
        super().wait_ready()
        self.last = last_message(self)

    @property
    def source(self):
        # Of a publisher of ours, the router is not told where to ask.
        replay = None if self.server.settings.plugin else self.server.replay_endpoint
        return self.server.events_endpoint, "", replay

    def ask(self, prompt, *, max_tokens=1, salt="", reset=False):
        if reset:
            wait_until(self._has_reset, "the cache is emptied")
        cached = self.generate([prompt], max_tokens=max_tokens, salt=salt or None)
        self.last = last_message(self)
        return cached

    def _has_reset(self):
        return self.endpoint.post("/flush_cache").status == http.HTTPStatus.OK

    def look(self):
        """Ask the oracle for the blocks."""
        device, self.offloaded = self.cached_by_tier()
        self.blocks_of = {0: device}


@dataclass(frozen=True)
class SglangRow:
    """As Row. model: the tiny Llama by default; flags: what goes to SGLang; hides_states: whether
    the router is told that it has windows or states, as the standalone router reads in /server_info
    (tests/engines/test_sglang_windows.py).
    """

    model: str = ""
    num_blocks: int = 100
    ask: Callable[[Any], dict] = plainly
    flags: tuple[str, ...] = ()
    hides_states: bool = False
    drafts = False

    def recipe(self, name, wire="vllm"):
        model = {}
        if self.model:
            model = {"save_model": lambda folder: save_model(self.model, folder)}
        return plugged_sglang(
            name,
            SglangEngine,
            is_stock=wire == "vllm",
            plugins=(CPU_PLUGIN,),
            num_blocks=self.num_blocks,
            flags=(*self.flags, *(WITHOUT_WEIGHTS if self.model else ())),
            **model,
        )


ROWS = {
    "SGLang, full attention, salts, cache resets": SglangRow(ask=with_salts_and_resets),
    "SGLang, HiCache, salts, cache resets": SglangRow(
        ask=with_salts_and_resets, num_blocks=60, flags=HICACHE
    ),
    "SGLang, windows as full attention (Gemma 3)": SglangRow("window-and-full"),
    "SGLang, a window and full attention (Mellum)": SglangRow("mellum", hides_states=True),
}
