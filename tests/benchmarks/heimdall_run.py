"""The workload and fleet of Heimdall's example in virtual time.

In:  a ramp of load, a cache size, service times, a policy, a seed.   Out: what became of each
request, by stage.

What the example says: 8 workers, 230 groups of 5 prompts, a system prompt of 8000 tokens and a user
prompt of 1000, answers of 1000; warmed up at 46 requests a second, then stages from 3 to 100;
steps of up to 65536 prompt tokens and 512 requests. What it does not say is in Setting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvplug.sim.engine_config import TimeModel
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals, Outcome, replay
from kvplug.sim.replay.policies import make_policy
from kvplug.sim.replay.workload import BlockSource, Request, Workload, request_of

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

NUM_WORKERS: Final = 8
NUM_GROUPS, PROMPTS_PER_GROUP = 230, 5
NUM_PROMPTS: Final = NUM_GROUPS * PROMPTS_PER_GROUP
SYSTEM_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 8000, 9000, 1000
WARM_RATE: Final = 46.0
RATES: Final = (3.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0)
"""Requests a second, of the warm-up and of the stages; between 3 and 100 they are a guess."""

BLOCK_SIZE: Final = 320
"""Ten of the example's blocks of 32 tokens: a replay takes a fraction of the time. System prompts
are whole blocks as well, and of a prompt 8960 tokens can be cached instead of 8992."""

_DRAINED_S: Final = 3600.0
# Qwen3-32B in 16 bits on four dies of 1.6 TB/s each, of which 60 % are reached: 65.5 GB of weights
# per step, and 10,000 tokens of 256 KiB for each sequence in it.
DECODE_BASE_S, DECODE_PER_SEQUENCE_S = 0.017, 0.0007


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the example leaves open.

    cache_tokens: room in each worker's cache; by the memory of the example about 600,000.
    requests_per_stage: of each rate. pauses: whether a stage begins when the one before is over.
    decode_factor: times as long as memory bandwidth says. prefill_tokens_per_s is calibrated.
    """

    cache_tokens: int
    requests_per_stage: int
    pauses: bool = True
    decode_factor: float = 1.0
    prefill_tokens_per_s: float = 20_000.0

    def spec(self, block_size: int) -> EngineSpec:
        """Of each worker."""
        return EngineSpec(
            num_blocks=self.cache_tokens // block_size,
            block_size=block_size,
            max_num_seqs=512,
            max_num_batched_tokens=65_536,
            time_model=TimeModel(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                decode_base_s=DECODE_BASE_S * self.decode_factor,
                decode_per_sequence_s=DECODE_PER_SEQUENCE_S * self.decode_factor,
            ),
        )

    def with_rate(self, prefill_tokens_per_s: float) -> Setting:
        """The same, with workers of this speed."""
        return replace(self, prefill_tokens_per_s=prefill_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One replay."""

    setting: Setting
    policy: str
    seed: int
    block_size: int = BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Result:
    """Of each request: seconds to the first token and in all, and the stage (0 is the warm-up);
    hit_share is of the stages' prompt tokens; answered: of each stage, the share of its requests
    that had their first token when the last one came.
    """

    ttft_s: F64
    total_s: F64
    stage: I64
    hit_share: float
    answered: F64

    def percentiles_s(self, stages: I64 | None = None) -> F64:
        """P50, P75, P90 of the time to first token, of these stages or of all but the warm-up."""
        mine = self.stage > 0 if stages is None else np.isin(self.stage, stages)
        return np.asarray(np.percentile(self.ttft_s[mine], [50, 75, 90]))


def stage_lengths(setting: Setting) -> list[tuple[float, int]]:
    """(rate, requests) of the warm-up, in which every prompt comes once, and of each stage."""
    return [(WARM_RATE, NUM_PROMPTS), *((rate, setting.requests_per_stage) for rate in RATES)]


def make_workload(setting: Setting, seed: int, block_size: int) -> Workload:
    """Every prompt comes once before one comes again, each time in another order."""
    source = BlockSource(seed)
    prompts = _prompts(source, block_size)
    requests: list[Request] = []
    order: list[int] = []
    now_s = 0.0
    for rate, count in stage_lengths(setting):
        for gap_s in source.random.exponential(1 / rate, count).tolist():
            now_s += gap_s
            order = order or source.random.permutation(len(prompts)).tolist()
            requests.append(_again(prompts[order.pop()], source, now_s))
        now_s += _DRAINED_S if setting.pauses else 0.0
    return Workload(name="heimdall", block_size=block_size, requests=requests)


def _prompts(source: BlockSource, block_size: int) -> list[Request]:
    groups = [source.take(SYSTEM_TOKENS // block_size) for _ in range(NUM_GROUPS)]
    return [
        request_of(source, group, PROMPT_TOKENS, ANSWER_TOKENS, block_size)
        for group in groups
        for _ in range(PROMPTS_PER_GROUP)
    ]


def _again(prompt: Request, source: BlockSource, arrival_s: float) -> Request:
    """The prompt, to be answered in other words."""
    answer_blocks = source.take(len(prompt.answer_blocks))
    return Request(prompt.blocks, PROMPT_TOKENS, ANSWER_TOKENS, answer_blocks, arrival_s)


def run(job: Job) -> Result:
    """Replay."""
    setting = job.setting
    workload = make_workload(setting, job.seed, job.block_size)
    specs = (setting.spec(job.block_size),) * NUM_WORKERS
    policy = make_policy(job.policy, specs, job.seed)
    outcome = replay(workload, specs, policy, Arrivals(), seed=job.seed)
    return _result(outcome, [count for _, count in stage_lengths(setting)])


def _result(outcome: Outcome, counts: list[int]) -> Result:
    stage = np.repeat(np.arange(len(counts)), counts)
    last_s = outcome.arrived_s[np.cumsum(counts) - 1]
    is_answered = outcome.arrived_s + outcome.ttft_s <= last_s[stage]
    counted = stage > 0
    hit_share = outcome.hit_tokens[counted].sum() / outcome.prompt_tokens[counted].sum()
    answered = np.bincount(stage, weights=is_answered) / np.array(counts)
    return Result(outcome.ttft_s, outcome.total_s, stage, float(hit_share), answered)
