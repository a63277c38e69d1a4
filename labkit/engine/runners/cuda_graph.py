"""Decode steps on a GPU: recorded once as a CUDA graph and then replayed, or launched one by one under a profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.slots import Slots
from labkit.engine.runners.runner import Runner, RunnerInfo
from labkit.engine.runners.staged import StagedRunner
from labkit.engine.runners.step import Ahead, Node, Pending, StepInput, StepOutput
from labkit.kernels import ModelWeights
from labkit.kernels.cache_stream import CachePass
from labkit.kernels.choice.triton_impl import DeviceChoice
from labkit.kernels.decode_step import StreamedLayers, TextRules
from labkit.kernels.decode_step.triton_ends import Buffers, StepInputs, StepState
from labkit.kernels.decode_step.triton_impl import TritonStep
from labkit.kernels.gpu import Launcher, has_dependent_launch
from labkit.kernels.slot_stream import require_whole
from labkit.kernels.types import Rotary, Rows
from labkit.stages import Phase, Stage, listening, message, stage


@dataclass
class Recording:
    """Step on certain slots: its inputs and outputs, and once it is recorded, its graph."""

    inputs: StepInputs
    greedy: bool
    choice: DeviceChoice | None = None
    output: Tensor | None = None
    graph: "torch.cuda.CUDAGraph | None" = None
    nodes: list[Node] = field(default_factory=list)

    def takes(self, rules: TextRules) -> bool:
        """Sets the texts and the rules of the next step. False: the memory of the choice cannot hold them."""
        assert self.choice is not None
        return self.choice.set(rules.tokens[:, : rules.length], rules.rules(rules.length))


class GpuDecoder:
    """Runs the decode steps of a range of layers.

    graphs: records and replays CUDA graphs. Otherwise every step is launched kernel by kernel. This is necessary if
    layers, or keys and values, are offloaded: a graph needs them at fixed addresses.
    watched: replays graphs under a profiler, too. The stage ranges are announced once, while a graph is recorded, and
    the graph's nodes lead back to them. Otherwise a profiler sees launched steps, each kernel within its stage's range.
    dependent_launch: starts each kernel while the previous one ends; None: in graphs that are not watched, if the GPU
    can.
    streamed: the offloaded layers; None: all layers are resident.
    """

    def __init__(
        self,
        weights: ModelWeights,
        launch: Launcher,
        device: torch.device,
        *,
        graphs: bool,
        watched: bool = False,
        dependent_launch: bool | None = None,
        streamed: StreamedLayers | None = None,
    ) -> None:
        self.weights, self.launch, self.device, self.graphs, self.watched = weights, launch, device, graphs, watched
        self.dependent_launch, self.streamed = dependent_launch, streamed
        self.step = TritonStep(weights, launch, streamed)
        self.last: Recording | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The kernels of the latest step, in the order of a graph's nodes, each with its stage."""
        return tuple(self.last.nodes) if self.last else ()

    def __call__(
        self, inputs_B1: Tensor, cache: KVCache, rotary: Rotary | None, *, greedy: bool, rules: TextRules | None = None
    ) -> Tensor:
        """Runs one token of each sequence. Returns the next tokens int64 [B, 1] if `greedy`, else logits float32
        [B, 1, V], or rows float32 [B, 1, H] of layers without a head. The caller increases the cache's length.

        inputs_B1: tokens int64 [B, 1], or rows for layers without an embedding.
        rules: the step also chooses tokens for these texts from its logits; see `chosen`.
        """
        slots, batch = cache.slots, len(inputs_B1)
        greedy = greedy and self.weights.head is not None
        recording = self._recording(slots, cache, rotary, greedy, None if rules is None else rules.samples)
        if rules is not None and not recording.takes(rules):
            recording = self._recording(slots, cache, rotary, greedy, None)
        self.last = recording
        if slots.at != cache.length:
            slots.past.fill_(cache.length)
            slots.next_positions.copy_(slots.positions[:, cache.length])
        slots.at = -1  # if the step fails, the next step sets everything anew
        inputs = recording.inputs.buffers.given if self.weights.embedding is None else slots.tokens
        inputs[:batch].copy_(inputs_B1[:, 0])
        if not self.graphs or (listening() and not self.watched):
            self.launch.pdl = bool(self.dependent_launch)
            self._launch(recording, cache.begin_pass(range(cache.length, cache.length + 1)))
        else:
            if recording.graph is None:
                self._record(recording)
            assert recording.graph is not None
            recording.graph.replay()
        if self.streamed is not None:
            require_whole([self.streamed.stream], self.streamed.stream.pass_failed)
        slots.at = cache.length + 1
        assert recording.output is not None
        return recording.output[:batch].clone().unsqueeze(1)

    def chosen(self, batch: int) -> Tensor | None:
        """The tokens int64 [B] that the latest step has chosen by rules; None: the caller has to choose."""
        return None if self.last is None or self.last.choice is None else self.last.choice.tokens(batch)

    def _recording(
        self, slots: Slots, cache: KVCache, rotary: Rotary | None, greedy: bool, samples: bool | None
    ) -> Recording:
        """samples: whether rules draw tokens; None: the step chooses no tokens by rules."""
        key = (greedy, samples, cache.holes, rotary is None or rotary.cosine.data_ptr())
        if key not in slots.recordings:
            batch = slots.shape[0]
            alibi = cache.config.position == "alibi"
            visible = slots.visible if cache.holes else None
            with torch.inference_mode(False):  # as for the slots
                buffers = Buffers(self.weights, batch, self.device)
                buffers.given.zero_()  # also for the bucket's unused sequences
                choice = None if samples is None else DeviceChoice(buffers.logits, slots.shape[1] + 1, samples=samples)
            inputs = StepInputs(
                state=StepState(slots.tokens, slots.next_positions, slots.past),
                buffers=buffers,
                rows=Rows(batch, 1, slots.next_positions, slots.first, visible, slots.positions if alibi else None),
                rotary=rotary,
                caches=[slots.heads.layer(index, 0, slots.past) for index in range(cache.config.num_layers)],
            )
            slots.recordings[key] = Recording(inputs, greedy, choice)
        recording: Recording = slots.recordings[key]
        return recording

    def _launch(self, recording: Recording, kv_pass: CachePass | None = None) -> None:
        nodes: list[Node] = []
        launched: list[str] = []

        @contextmanager
        def around(region: Stage, layer: int | None) -> Iterator[None]:
            begin = len(launched)
            with stage(Phase.DECODE, region, layer):
                yield
            text = message(Phase.DECODE, region, layer)
            nodes.extend(Node(kernel, text) for kernel in launched[begin:])

        self.launch.launched = launched
        recording.output = self.step(
            recording.inputs, around, greedy=recording.greedy, choice=recording.choice, kv_pass=kv_pass
        )
        recording.nodes = nodes

    def _record(self, recording: Recording) -> None:
        """Records the graph. A first run compiles the kernels; the tensors that it advanced are set back, and its keys
        and values are overwritten later.
        """
        state = recording.inputs.state
        advanced = (state.tokens, state.positions, state.past, recording.inputs.buffers.given)
        before = [tensor.clone() for tensor in advanced]
        dependent = has_dependent_launch() and not self.watched
        self.launch.pdl = dependent if self.dependent_launch is None else self.dependent_launch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._launch(recording)
            for tensor, value in zip(advanced, before, strict=True):
                tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread queries its events
            self._launch(recording)
        recording.graph = graph


class CudaGraphRunner(Runner):
    """Runs decode steps as CUDA graphs, or launches them if layers, or keys and values, are offloaded. Prompts run op
    by op, since their sizes differ.
    """

    def __init__(self, staged: StagedRunner, decoder: GpuDecoder) -> None:
        super().__init__(staged.layer_range, staged.clock)
        self.staged, self.decoder = staged, decoder

    @property
    def info(self) -> RunnerInfo:
        return replace(super().info, nodes=self.decoder.nodes)

    def _begin(self, step: StepInput) -> Pending:
        layer_range, cache = self.layer_range, step.cache
        reach = cache.reach + max(1, cache.capacity - cache.length)
        if not step.follows or not layer_range.rotary_of(cache).holds(reach, cache):
            return self.staged._begin(step)
        inputs = step.rows if step.tokens is None else step.tokens
        assert inputs is not None
        ahead = self._choosing(step)
        with layer_range.one_at_a_time:
            rotary = layer_range.rotary_of(cache).reaching(reach)
            rules = None if ahead is None else ahead.choice
            result = self.decoder(inputs, cache, rotary, greedy=step.greedy, rules=rules)
            tokens = None if ahead is None else self.decoder.chosen(len(inputs))
        cache.reach += 1
        cache.length += 1
        if ahead is not None and tokens is not None:
            ahead.add(tokens)
            return StepOutput(chosen=1)
        return StepOutput(rows=result) if layer_range.weights.head is None else StepOutput(result)

    def _choosing(self, step: StepInput) -> Ahead | None:
        """The choice of tokens by the step's own rules; None: the caller chooses."""
        rules = None if step.ahead is None or not self.layer_range.chooses_tokens(step) else step.ahead.choice
        return None if rules is None or rules.tokens.device != self.decoder.device else step.ahead
