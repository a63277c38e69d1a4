"""Runs of several ranks, each launched once for all tests of its size, because starting takes longer than all the
computations.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.gguf_files import gguf_model, write_gguf
from helpers.ranks.cut_models import every_model_on_two_ranks, three_ranks
from helpers.ranks.experts_apart import four_ranks_with_experts
from helpers.ranks.experts_offloaded import fetched_layers_and_experts
from helpers.ranks.sliced_ranks import Outcomes, outcomes_of_slicing
from helpers.ranks.two_ranks import cut_and_divided

import labkit

TIMEOUT_S = 240


@dataclass(frozen=True)
class World:
    """The answers of all ranks, and the folder that they worked in."""

    answers: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="session")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("of-two")
    write_gguf(folder / "model.gguf", gguf_model("bloom"), "Q4_1")
    labkit.init_inference(
        labkit.resolve("tiny-llama"), impl="cpp", dtype=torch.float32, save_mp_checkpoint_path=folder / "whole"
    ).destroy()
    return World(labkit.launch(cut_and_divided, str(folder), tp_size=2, timeout_s=TIMEOUT_S), folder)


@pytest.fixture(scope="session")
def every_model_of_two(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(
        labkit.launch(every_model_on_two_ranks, tp_size=2, timeout_s=TIMEOUT_S), tmp_path_factory.mktemp("every-model")
    )


@pytest.fixture(scope="session")
def fetching(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("fetching")
    return World(labkit.launch(fetched_layers_and_experts, str(folder), tp_size=2, timeout_s=TIMEOUT_S), folder)


@pytest.fixture(scope="session")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(labkit.launch(three_ranks, tp_size=3, timeout_s=TIMEOUT_S), tmp_path_factory.mktemp("of-three"))


@pytest.fixture(scope="session")
def sliced_on_three() -> list[Outcomes]:
    return labkit.launch(outcomes_of_slicing, tp_size=3, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="session")
def sliced_on_two() -> list[Outcomes]:
    return labkit.launch(outcomes_of_slicing, tp_size=2, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="session")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("of-four")
    return World(labkit.launch(four_ranks_with_experts, str(folder), tp_size=4, timeout_s=TIMEOUT_S), folder)
