"""Options of the commands that generate text, and how these commands find and load a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from labkit.system.shown import shown, shown_lines
from labkit.system.terminal import terminal

if TYPE_CHECKING:
    from labkit.engine import InferenceEngine
    from labkit.weights.source import ModelSource

NEW_OF_ANSWER = 512

System = Annotated[str | None, typer.Option(help="System prompt of a chat model.")]
Temperature = Annotated[float, typer.Option(help="0: greedy; else sampling, from 0.000001 on.")]
ResidentGb = Annotated[
    float | None,
    typer.Option(help="GB of memory for weights; layers or experts that do not fit are read from the disk."),
]
OffloadPath = Annotated[
    Path | None, typer.Option("--offload", help="Folder on the disk for offloaded layers. Default: labkit's cache.")
]
Seed = Annotated[int, typer.Option(help="Seed of random weights and of sampling.")]

err = terminal(stderr=True)


def remark(text: str) -> None:
    """Prints a dim line on stderr."""
    err.print(escape(text), style="dim", highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """Writes text of a model to stdout at once."""
    typer.echo(shown_lines(text), nl=False)


def find_model(model: str | None, *, dtype: str, threads: int | None, seed: int) -> ModelSource:
    """Checks the name of the precision, sets the threads, and returns the model of this name, not loaded yet. None: the
    trained model that is installed, see `labkit.weights.box`.
    """
    import torch

    from labkit.weights.box import default_model
    from labkit.weights.precision import precision_of
    from labkit.weights.resolve import resolve

    precision_of(dtype)
    if threads is not None:
        torch.set_num_threads(threads)
    name = model or default_model()
    with err.status(f"finding {escape(shown(name))}"):
        return resolve(name, seed=seed, any_architecture=True)


def load_engine(
    source: ModelSource, *, dtype: str, seed: int, resident_gb: float | None = None, offload: Path | None = None
) -> InferenceEngine:
    """Loads the engine, reports the origin of its weights on stderr, and seeds the random numbers with `seed`.

    With resident_gb or offload, layers may be streamed: see `Offload`.
    """
    from transformers import set_seed

    from labkit.engine import init_inference
    from labkit.harness.stored_weights import stored_by, weights_text
    from labkit.weights.precision import precision_of

    options: dict[str, Any] = {"replace_with_kernel_inject": True, **precision_of(dtype).options}
    if resident_gb is None and offload is None:
        with err.status(f"loading {escape(shown(source.name))}"):
            engine = init_inference(source, **options)
    else:  # packing shows a bar of its own
        engine = init_inference(source, offload={"resident_gb": resident_gb, "path": offload}, **options)
    remark(f"{source.origin}; {weights_text(stored_by(engine))} weights{_streamed(engine)}{_level(engine)}")
    set_seed(seed)
    return engine


def _level(engine: InferenceEngine) -> str:
    from labkit.engine.engine import InjectedEngine
    from labkit.models.level_names import DERIVED

    if isinstance(engine, InjectedEngine):
        return f"; no row: {engine.why}; hooks in transformers' model"
    return f"; a {DERIVED}" if engine.level == DERIVED else ""


def _streamed(engine: InferenceEngine) -> str:
    if (store := engine.expert_store) is not None:
        held, total = f"{store.slots:,}", f"{store.layers * store.per_layer:,}"
        return f"; {held} of {total} experts are in memory, the others are read from {store.path.parent} when chosen"
    if (streamed := engine.streamed) is None:
        return ""
    layers = f"{len(streamed.layers)} of {len(streamed.blocks)} layers, {streamed.bytes_per_step / 1e9:.3g} GB,"
    origin = "copied from the host's memory" if streamed.file is None else f"read from {streamed.file.parent}"
    return f"; {layers} are {origin} for every token"


def sampling(temperature: float) -> dict[str, Any]:
    """The arguments of `generate` for this temperature."""
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
