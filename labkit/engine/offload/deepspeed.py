"""DeepSpeed's spelling of `offload` (`zero_optimization` and `aio`), and the training options of its configs.

The names come from DeepSpeed 0.19 (runtime/zero/config.py, runtime/zero/offload_config.py, runtime/swap_tensor).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

log = logging.getLogger("labkit")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PARAM = _names("buffer_count buffer_size device max_in_cpu nvme_path pin_memory")
THRESHOLDS = _names(
    """
    max_live_parameters max_reuse_distance model_persistence_threshold param_persistence_threshold
    prefetch_bucket_size
    """
)
PREFETCH = THRESHOLDS | {f"stage3_{name}" for name in THRESHOLDS}
TRAINING = _names(
    """
    allgather_bucket_size allgather_partitions contiguous_gradients ignore_unused_parameters load_from_fp32_weights
    memory_efficient_linear module_granularity_threshold offload_optimizer overlap_comm reduce_bucket_size
    reduce_scatter round_robin_gradients stage3_gather_16bit_weights_on_model_save sub_group_size
    zero_hpz_partition_size zero_quantized_weights
    """
)
ZERO = {"stage", "offload_param"} | PREFETCH | TRAINING
AIO = _names("block_size intra_op_parallelism overlap_events queue_depth single_submit thread_count use_gds")
OF_TRAINING = _names(  # keys of the whole config (runtime/constants.py, runtime/config.py)
    """
    activation_checkpointing amp autotuning bf16 bfloat16 comet comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_types disable_allgather dump_state
    eigenvalue elasticity flops_profiler fp16 fp32_allreduce gradient_accumulation_steps gradient_clipping
    gradient_predivide_factor hybrid_engine load_universal_checkpoint memory_breakdown monitor_config nebula
    optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensorboard timers
    torch_autocast train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """
)


def without_training(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without DeepSpeed's training options. One warning names the omitted options."""
    if unused := sorted(options.keys() & OF_TRAINING):
        log.warning("labkit: ignored, for training only: %s; dtype sets the type of the weights", ", ".join(unused))
    return {name: value for name, value in options.items() if name not in OF_TRAINING}


def offload_of(zero: Any, aio: Any) -> dict[str, Any] | None:
    """Returns the option `offload` for these values of `zero_optimization` and `aio`; None: nothing is offloaded.

    One warning names the options that have no meaning here. Raises UserError for unknown names and for contradictory
    values.
    """
    zero, aio = _object("zero_optimization", zero, ZERO), _object("aio", aio, AIO)
    offload_param = zero.get("offload_param")
    param = _object("zero_optimization.offload_param", offload_param, PARAM)
    device, path, stage = param.get("device", "none"), param.get("nvme_path"), zero.get("stage", 0)
    if device not in ("none", "cpu", "nvme"):
        raise UserError(f"zero_optimization.offload_param.device: got {device!r}, expected 'cpu', 'nvme' or 'none'")
    if device != "none" and stage != 3:
        raise UserError(
            f"zero_optimization: got offload_param with stage {stage!r}, expected stage 3: the other stages "
            "keep their parameters in memory"
        )
    if device == "nvme" and path is None:
        raise UserError(
            "zero_optimization.offload_param: got device 'nvme' without nvme_path; name a folder on the disk"
        )
    if device != "nvme" and path is not None:
        raise UserError(
            f"zero_optimization.offload_param: got nvme_path with device {device!r}; use 'nvme', or leave it out"
        )
    unused = [f"zero_optimization.{name}" for name in sorted(zero.keys() & (PREFETCH | TRAINING))]
    unused += [f"offload_param.{name}" for name in ("buffer_size", "max_in_cpu", "pin_memory") if name in param]
    unused += [f"aio.{name}" for name in sorted(aio)]
    if unused:
        log.warning(
            "labkit: ignored, no meaning in labkit: %s; offload={'resident_gb': ..., 'slots': ...} sets how much is "
            "resident and how many layers are prefetched",
            ", ".join(unused),
        )
    if device == "none":
        return None
    slots = {"slots": param["buffer_count"]} if "buffer_count" in param else {}
    return {"device": "cpu", **slots} if device == "cpu" else {"device": "disk", "path": path, **slots}


def _object(name: str, value: Any, known: Iterable[str]) -> Mapping[str, Any]:
    """Returns the dict that is the value of an option. Raises UserError for names that are not in `known`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{name}: got {value!r}, expected a dict")
    if unknown := sorted(value.keys() - set(known)):
        raise UserError(
            f"{name}: got {unknown[0]!r}{did_you_mean(unknown[0], sorted(known))}; expected some of "
            f"{', '.join(sorted(known))}"
        )
    return value
