"""Choice between two runners for each step: the fast one, or under a profiler the staged one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from labkit.engine.parallel.ranks import draw_alike
from labkit.engine.parallel.shared_calls import SharedCalls
from labkit.engine.runners.runner import Runner, RunnerInfo
from labkit.engine.runners.staged import StagedRunner
from labkit.engine.runners.step import CHUNK_ROWS, Pending, StepInput
from labkit.stages import listening


class WatchedRunner(Runner):
    """Runs steps fast, or stage by stage if a profiler listens or hidden states are requested."""

    def __init__(self, fast: Runner, staged: StagedRunner) -> None:
        super().__init__(staged.layer_range, fast.clock)
        self.fast, self.staged = fast, staged
        self._always_staged = False

    @property
    def info(self) -> RunnerInfo:
        return self.fast.info

    def _begin(self, step: StepInput) -> Pending:
        return (self.staged if self._is_watched(step) else self.fast)._begin(step)

    @contextmanager
    def stage_by_stage(self) -> Iterator[None]:
        """Makes every step in the block run op by op, as under a profiler: for tests, and to measure the cost."""
        before, self._always_staged = self._always_staged, True
        try:
            yield
        finally:
            self._always_staged = before

    def _is_watched(self, step: StepInput) -> bool:
        return self._always_staged or step.hidden_states or listening()


class RankedRunner(WatchedRunner):
    """WatchedRunner on one of several ranks. The ranks agree on every prompt, and on how its steps run: a profiler may
    listen to one rank alone.

    calls: shared by all ranks.
    """

    def __init__(self, fast: Runner, staged: StagedRunner, calls: SharedCalls) -> None:
        super().__init__(fast, staged)
        assert self.layer_range.ranks is not None
        self._ranks, self._calls = self.layer_range.ranks, calls
        self._agreed = False  # whether steps run stage by stage

    def shared_call(self, name: str) -> AbstractContextManager[None]:
        return self._calls.one(name)

    def before_generation(self) -> None:
        draw_alike(self._ranks.device, lambda state: self._ranks.gather(state)[0])

    def after_generation(self, tokens: Tensor) -> None:
        self._ranks.agree("the generated tokens", tokens)

    def _is_watched(self, step: StepInput) -> bool:
        if step.follows:
            return self._agreed
        mine = super()._is_watched(step) or step.shape[0] > CHUNK_ROWS  # the exchange has no room for more rows
        inputs = (step.tokens, step.cache.length, step.attention_mask, step.position_ids)
        outputs = (step.keep, step.greedy, step.top, step.hidden_states)
        self._agreed = self._ranks.agree("the tokens", *inputs, *outputs, flag=mine)
        return self._agreed
