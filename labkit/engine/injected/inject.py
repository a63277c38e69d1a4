"""Replaces a transformers model's linears, plain MLPs and tied embeddings by modules on packed matrices, and norms and
single tokens of linear attention by kernels.

Weights are packed once. Linears that read the same tensor become one matrix, and a plain MLP becomes one call. A run on
a few tokens shows what each module computes, and each replacement has to return the same there.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from labkit.engine.alterations import changed_code
from labkit.engine.injected.experts import experts_instead, routed_rows, stacked_experts
from labkit.engine.injected.functions import replace_functions
from labkit.engine.injected.modules import (
    FAR,
    InjectedEmbedding,
    InjectedLinear,
    InjectedMlp,
    InjectedModule,
    JoinedLinear,
    JoinedLinears,
)
from labkit.engine.injected.norms import norm_instead, written_norms
from labkit.engine.injected.part_packer import HEAD, PartPacker
from labkit.engine.parallel.slicing.linear import emptied
from labkit.kernels.types import NO_NORM, Linear, MlpWeights, float_dtype
from labkit.models.observed.calls import bias_of, calls_of, distance, is_linear, matrix
from labkit.models.observed.mlps import PlainMlp, may_be_mlp, plain_mlp
from labkit.system.errors import UnsupportedError
from labkit.weights.quantise import Quantization

FAR_CODES = {8: 0.1, 4: 0.5}
MOST_LAYERS_APART = 10  # the distance of a whole model's results / of one module's outputs, at most
NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Replacement:
    """A product, a whole MLP, a norm or a function, in the place of some modules or of a function that they call.

    kind: "linear", "joined linears", "MLP", "experts", "head", "embedding", "norm", "gated norm", or the name of the
    function.
    """

    kind: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Injected:
    """A model with replaced modules.

    left: why other linears stayed as they are, by path.
    """

    model: PreTrainedModel
    replaced: tuple[Replacement, ...]
    left: Mapping[str, str]

    def summary(self) -> list[str]:
        """Replacements in words. All layers are one line: "joined linears: model.layers.*.self_attn.q_proj, …"."""
        counts: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        for made in self.replaced:
            counts[made.kind, tuple(NUMBERS.sub("*", path) for path in made.paths)] += 1
        return [f"{count} x {kind}: {', '.join(paths)}" for (kind, paths), count in counts.items()]


def inject(
    model: PreTrainedModel | Callable[[], PreTrainedModel],
    dtype: torch.dtype,
    quant: Quantization,
    *,
    consume: bool = False,
) -> Injected:
    """A copy of a model, with its linears on packed matrices. Everything else is shared with the original.

    model: in memory, or a function that loads it. Then each weight is freed as soon as it is packed.
    dtype: of the matrices; int8: quantised as `quant` says, the head in bfloat16 unless `quant` names it.
    consume: frees each replaced weight of a model in memory, in the end.

    Raises UnsupportedError for a model that computes something else with packed parts.
    """
    refusal, in_memory = "", isinstance(model, PreTrainedModel)
    for tied in (True, False):  # some models use the embedding's weight in other ways, too
        injector = _Injector(model if in_memory else model(), dtype, quant, tied, early=not in_memory)
        injected = injector.run()
        if not (refusal := injector.refusal(injected)):
            if consume:
                injector.consume()
            return injected
    raise UnsupportedError(
        f"{type(injector.model).__name__} cannot run with packed parts: {refusal}; use transformers' own model"
    )


@dataclass
class _Injector:
    model: PreTrainedModel
    dtype: torch.dtype
    quant: Quantization
    tied: bool  # whether an embedding that is tied to the head reads the head's packed matrix
    early: bool  # whether the original's weights are freed while they are packed
    made: dict[int, nn.Module] = field(default_factory=dict)  # by id of the original
    taken: set[int] = field(default_factory=set)  # ids of the linears and experts that have a replacement
    replaced: list[Replacement] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def run(self) -> Injected:
        model = self.model
        self.linears = dict(self._suitable())
        mlps = {
            path: module
            for path, module in model.named_modules()
            if may_be_mlp(module, self.linears) and not any(map(changed_code, module.modules()))
        }
        norms = dict(written_norms(model, None if self.dtype.is_floating_point else self.compute_dtype))
        calls = calls_of(model, {"": model} | self.linears | mlps | norms)
        self.expected = calls.pop("").y
        self.calls = {path: call for path, call in calls.items() if call.alone}
        shapes = [(rows, columns) for rows, columns in (matrix(linear).shape for linear in self.linears.values())]
        mixtures = {}
        for path, module in model.named_modules():
            if stacked := stacked_experts(module):
                mixtures[path] = module
                shapes += stacked.shapes
        self.packer = PartPacker(self.dtype, self.quant, shapes)
        self._replace_head()
        for path, module in mlps.items():
            if path in self.calls:
                self._replace_mlp(path, module)
        for paths in self._readers_of_one_tensor():
            self._replace_linears(paths)
            self._free(linear for path in paths if id(linear := self.linears[path]) in self.taken)
        for path, module in mixtures.items():
            self._replace_experts(path, module)
        self.left |= {path: "a forward does not call it alone" for path in self.linears if path not in self.calls}
        for path, norm in norms.items():
            self._replace_norm(path, norm)
        self.calls.clear()  # all activations of the trial
        memo: dict[int, Any] = {id(tensor): _shared(tensor) for tensor in model.parameters()}
        injected: PreTrainedModel = copy.deepcopy(model, memo | self.made)
        if self.dtype.is_floating_point:
            injected.to(self.dtype)
        self.replaced += [Replacement(name, (path,)) for name, path in replace_functions(injected.eval())]
        return Injected(injected, tuple(self.replaced), self.left)

    def refusal(self, injected: Injected) -> str:
        """Why the injected model does not return what the original does; empty: it does. Codes have no bound."""
        try:
            actual = calls_of(injected.model, {"": injected.model})[""].y
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)
        if not self.dtype.is_floating_point:
            return ""
        far = distance(actual, self.expected)
        return "" if far <= MOST_LAYERS_APART * FAR[self.dtype] else f"its results differ by {far:.1%}"

    def consume(self) -> None:
        """Frees the weights of the original that have a replacement."""
        for module in self.model.modules():
            if id(module) in self.taken:
                emptied(module)

    def _free(self, modules: Iterable[nn.Module]) -> None:
        """Frees the weights of replaced modules, unless a module that stays has them, too."""
        for module in modules if self.early else ():
            if all(user in self.made or user in self.taken for user in self._users[id(module.weight)]):
                emptied(module)

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        """The ids of the modules that have each weight, by the weight's id."""
        users: dict[int, list[int]] = defaultdict(list)
        for module in self.model.modules():
            users[id(module._parameters.get("weight"))].append(id(module))
        return users

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the activations around the matrices."""
        return self.dtype if self.dtype.is_floating_point else self.model.dtype

    def _suitable(self) -> Iterator[tuple[str, nn.Module]]:
        """The linears that may be replaced, by path."""
        inside = {
            id(part)
            for module in self.model.modules()
            if isinstance(module, nn.MultiheadAttention)
            for part in module.modules()
        }  # its forward reads their weights
        for path, module in self.model.named_modules():
            if not isinstance(module, nn.Linear | Conv1D) or id(module) in inside:
                continue
            weight: Any = module.weight
            if change := changed_code(module):
                self.left[path] = f"it {change}"
            elif not is_linear(module):
                self.left[path] = f"its class, {type(module).__name__}, computes more than a linear"
            elif not weight.is_floating_point() or weight.layout != torch.strided:
                self.left[path] = f"its weight is {weight.dtype}, {weight.layout}"
            else:
                yield path, module

    def _replace_norm(self, path: str, module: nn.Module) -> None:
        gated = path not in self.calls  # a gate is another argument
        if norm := norm_instead(module, gated=gated):
            self.made[id(module)] = norm
            self.replaced.append(Replacement("gated norm" if gated else "norm", (path,)))

    def _replace_head(self) -> None:
        """Replaces the head, and the embedding that it is tied to, so that their weights are in memory once."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        path = next((path for path, module in self.linears.items() if module is head), None)
        if head is None or path is None or path not in self.calls:
            return
        packed = self.packer.linears([head], HEAD)
        if not self._keep({path: InjectedLinear(packed, self.compute_dtype)}, "head"):
            return
        if self.tied and embedding is not None and getattr(embedding, "weight", None) is head.weight:
            scale = _embedding_scale(embedding)
            name = next(name for name, module in self.model.named_modules() if module is embedding)
            if scale is None:
                self.left[name] = "it is tied to the head, and computes more than a lookup"
                return
            self.made[id(embedding)] = InjectedEmbedding(packed, scale, self.compute_dtype)
            self.replaced.append(Replacement("embedding", (name,)))
        self._free([self.linears[path]])

    def _replace_mlp(self, path: str, module: nn.Module) -> None:
        inside = {name: linear for name, linear in self.linears.items() if name.rpartition(".")[0] == path}
        if any(id(linear) in self.taken for linear in inside.values()):
            return
        plain = plain_mlp(module, self.calls[path], inside, self.calls)
        if plain is None:
            return
        region = MlpWeights(norm=NO_NORM, up=self._first_matrix(plain), activation=plain.activation, gated=plain.gated)
        injected = InjectedMlp(region, self._packed(plain.down), self.compute_dtype)
        if self._keep({path: injected}, "MLP"):
            self.taken |= set(map(id, inside.values()))
            self._free(inside.values())

    def _first_matrix(self, plain: PlainMlp) -> Linear:
        if plain.halves:
            return self._packed(plain.up, gated=True, swapped=not plain.gate_first)
        return self._packed(*([plain.gate] if plain.gate else []), plain.up, gated=plain.gated)

    def _packed(self, *paths: str, gated: bool = False, swapped: bool = False) -> Linear:
        return self.packer.linears([self.linears[path] for path in paths], gated=gated, swapped=swapped)

    def _readers_of_one_tensor(self) -> list[list[str]]:
        """The linears that are not replaced yet, by module, by the tensor they read, and by whether they get codes."""
        groups: dict[tuple[str, int, int, bool], list[str]] = defaultdict(list)
        for path, call in self.calls.items():
            if path in self.linears and id(linear := self.linears[path]) not in self.taken:
                floats = self.packer.stays_floats(linear)
                groups[path.rpartition(".")[0], id(call.read), call.version, floats].append(path)
        return list(groups.values())

    def _replace_linears(self, paths: Sequence[str]) -> None:
        packed = self._packed(*paths)
        if len(paths) == 1:
            self._keep({paths[0]: InjectedLinear(packed, self.compute_dtype)}, "linear")
            return
        originals = [self.linears[path] for path in paths]
        outputs = [len(matrix(module)) for module in originals]
        joined = JoinedLinears(packed, outputs)
        new = {
            path: JoinedLinear(joined, number, outputs[number], self.compute_dtype, bias=bias_of(original) is not None)
            for number, (path, original) in enumerate(zip(paths, originals, strict=True))
        }
        self._keep(new, "joined linears")

    def _keep(self, new: Mapping[str, InjectedModule], kind: str) -> bool:
        """Keeps new modules whose outputs in the trial are the originals'; else these stay."""
        for path, module in new.items():
            call = self.calls[path]
            if not self._near(module(call.x.to(self.compute_dtype)), call.y, new, codes=kind != "head"):
                return False
        self.made |= {id(self.model.get_submodule(path)): module for path, module in new.items()}
        self.taken |= {id(self.linears[path]) for path in new if path in self.linears}
        self.replaced.append(Replacement(kind, tuple(new)))
        return True

    def _near(self, outputs: Tensor, expected: Tensor, paths: Iterable[str], *, codes: bool = True) -> bool:
        """Whether the outputs of a packed module are the original's; else these paths stay. codes: it may have some."""
        some = codes and not self.dtype.is_floating_point
        most = FAR_CODES[self.quant.weight.num_bits] if some else FAR[float_dtype(self.dtype)]
        if (far := distance(outputs, expected)) > most:
            self.left |= dict.fromkeys(paths, f"the packed module's outputs differ from its own by {far:.1%}")
        return far <= most

    def _replace_experts(self, path: str, module: nn.Module) -> None:
        stacked = stacked_experts(module)
        assert stacked is not None
        rows, chosen, shares = routed_rows(stacked)
        new = experts_instead(stacked, self.packer, self.compute_dtype)
        new._forward_hooks.update(module._forward_hooks)  # the sum over the ranks
        with torch.no_grad():
            outputs = new(rows.to(self.compute_dtype), chosen, shares)
            if not self._near(outputs, module(rows, chosen, shares), [path]):
                return
        self.made[id(module)] = new
        self.taken.add(id(module))
        self.replaced.append(Replacement("experts", (path,)))
        if self.early:
            emptied(module)


def _shared(tensor: Tensor) -> nn.Parameter:
    """A parameter in the memory of another one."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _embedding_scale(embedding: nn.Module) -> float | None:
    """The number by which an embedding multiplies the rows of its table; None: it computes something else."""
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    tokens = torch.arange(min(len(embedding.weight), 64))
    with torch.no_grad():
        rows, stored = embedding(tokens[None])[0], embedding.weight[tokens]
        if torch.equal(rows, stored):
            return 1.0
        scale = float(rows.abs().max() / stored.abs().max())
        return scale if rows.shape == stored.shape and distance(stored * scale, rows) < FAR[rows.dtype] else None
