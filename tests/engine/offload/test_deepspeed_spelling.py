"""The options of ZeRO-Inference work with DeepSpeed's names; options without a meaning in labkit are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.models.engines import vanilla

import labkit
from labkit.engine.options import read_options

# Names of DeepSpeed's own files that mean nothing to labkit (runtime/constants.py, runtime/config.py,
# runtime/zero/config.py, runtime/zero/offload_config.py, runtime/swap_tensor/constants.py).
NAMES = json.loads(Path(__file__).with_name("deepspeed_names.json").read_text())
NVME = {"device": "nvme", "nvme_path": "/scratch"}


def offload_of(zero: dict[str, Any], aio: dict[str, Any] | None = None) -> Any:
    return read_options({"zero_optimization": zero} | ({} if aio is None else {"aio": aio}), {}).offload


def test_a_disk_is_named_by_its_path_and_buffers_are_slots() -> None:
    offload = offload_of({"stage": 3, "offload_param": NVME | {"buffer_count": 5}})
    assert (offload.device, offload.path, offload.slots, offload.resident_gb) == ("disk", "/scratch", 5, None)
    assert offload_of({"stage": 3, "offload_param": {"device": "cpu"}}).device == "cpu"


@pytest.mark.parametrize(
    "zero", [{}, {"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload_param": {"device": "none"}}], ids=str
)
def test_without_an_offloaded_device_nothing_is_offloaded(zero: dict[str, Any]) -> None:
    assert offload_of(zero) is None


def test_what_has_no_meaning_here_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Uses the options of DeepSpeed's example of ZeRO-Inference."""
    zero = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 10**8,
        "stage3_param_persistence_threshold": 10**5,
        "stage3_max_live_parameters": 10**9,
        "offload_param": NVME | {"pin_memory": True, "buffer_count": 6, "buffer_size": 10**9, "max_in_cpu": 0},
    }
    offload_of(zero, {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 1, "single_submit": False})
    (record,) = caplog.records
    for name in (
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_prefetch_bucket_size",
        "offload_param.buffer_size",
        "offload_param.max_in_cpu",
        "offload_param.pin_memory",
        "aio.block_size",
        "aio.queue_depth",
        "aio.single_submit",
        "aio.thread_count",
    ):
        assert name in record.message
    caplog.clear()
    offload_of({"stage": 3, "offload_param": NVME})
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_param": NVME}},
            "got offload_param with stage 2, expected stage 3",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "with stage 0, expected stage 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "got device 'nvme' without nvme_path; name a folder",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME | {"device": "cpu"}}},
            "got nvme_path with device 'cpu'; use 'nvme', or leave it out",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "ssd"}}}, "device: got 'ssd', expected 'cpu'"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME}, "offload": {"path": "/elsewhere"}},
            "got offload and zero_optimization.offload_param, which mean the same",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_parm": NVME}},
            r"zero_optimization: got 'offload_parm' \(did you mean 'offload_param'",
        ),
        ({"aio": {"blocksize": 1}}, "aio: got 'blocksize'"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME, "cpu_offload_param": True}},
            "got cpu_offload_param and offload_param, which mean the same; leave cpu_offload_param out",
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload_param": True}}, "with stage 2, expected stage 3"),
        ({"zero_optimization": {"stage": 3, "cpu_offload_param": "yes"}}, "got 'yes', expected true or false"),
        ({"zero_optimization": 3}, "zero_optimization: got 3, expected a dict"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME | {"buffer_count": 1}}},
            "offload.slots: got 1, expected at least 2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_options(options, {})


@pytest.mark.parametrize(("part", "name"), [(part, name) for part in NAMES for name in NAMES[part]])
def test_every_name_of_deepspeed_without_a_meaning_is_named_and_left_aside(
    part: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    config: dict[str, Any] = {"zero_optimization": zero, "aio": {}}
    places = {"config": config, "zero_optimization": zero, "offload_param": zero["offload_param"], "aio": config["aio"]}
    expected = read_options(config, {})
    places[part][name] = True
    caplog.clear()
    assert read_options(config, {}) == expected
    (record,) = caplog.records
    assert name in record.message


def test_former_spellings_mean_the_present_ones() -> None:
    assert read_options({"zero_optimization": True}, {}) == read_options({"zero_optimization": {"stage": 1}}, {})
    assert read_options({"zero_optimization": False}, {}) == read_options({}, {})
    present = offload_of({"stage": 3, "offload_param": {"device": "cpu"}})
    assert offload_of({"stage": 3, "cpu_offload_param": True, "cpu_offload_use_pin_memory": True}) == present
    assert offload_of({"stage": 3, "cpu_offload_param": False, "offload_param": {"device": "cpu"}}) == present
    assert offload_of({"stage": 3, "cpu_offload_param": None}) is None


def test_the_spelling_of_deepspeed_makes_a_streamed_engine(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}}
    labkit.init_inference(vanilla("gpt2"), zero_optimization=zero)
    assert list(tmp_path.glob("*/*.safetensors"))


def test_what_a_config_says_about_training_is_named_once_and_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    training: dict[str, Any] = {
        "bf16": {"enabled": True},
        "steps_per_print": 10,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": NVME},
    }
    options = read_options({**training, "max_out_tokens": 7}, {})
    assert options.dtype is None
    assert options.offload is not None
    assert options.offload.path == "/scratch"
    (record,) = caplog.records
    assert "ignored, for training only: bf16, optimizer, steps_per_print, train_micro_batch_size_per_gpu" in (
        record.message
    )
    with pytest.raises(ValueError, match="unknown option steps_per_prnt"):
        read_options({"steps_per_prnt": 10}, {})
