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
OF_STAGE_3 = _names(  # with and without the prefix `stage3_`
    """
    allgather_sequential gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance
    model_persistence_threshold module_granularity_threshold param_persistence_threshold partition_stream_chunk_size
    prefetch_bucket_size use_all_reduce_for_fetch_params
    """
)
OF_ANY_STAGE = _names(
    """
    allgather_bucket_size allgather_partitions contiguous_gradients cpu_offload cpu_offload_use_pin_memory
    elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings memory_efficient_linear mics_hierarchical_params_gather mics_shard_size offload_optimizer
    overlap_comm override_module_apply pipeline_loading_checkpoint reduce_bucket_size reduce_scatter
    round_robin_gradients save_muon_momentum_buffer_in_memory stage3_gather_fp16_weights_on_model_save sub_group_size
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param
    """
)
WITHOUT_MEANING = OF_ANY_STAGE | OF_STAGE_3 | {f"stage3_{name}" for name in OF_STAGE_3}
ZERO = {"stage", "offload_param", "cpu_offload_param"} | WITHOUT_MEANING
AIO = _names("block_size intra_op_parallelism overlap_events queue_depth single_submit thread_count use_gds")
OF_TRAINING = _names(  # keys of the whole config (runtime/constants.py, runtime/config.py)
    """
    activation_checkpointing allgather_size amp autotuning bf16 bfloat16 comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather dump_state eigenvalue elasticity flops_profiler fp16 fp32_allreduce
    gradient_accumulation_steps gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine
    load_universal_checkpoint memory_breakdown monitor_config nebula optimizer pipeline prescale_gradients
    progressive_layer_drop quantize_training scheduler seq_parallel_comm_data_type sparse_attention sparse_gradients
    steps_per_print tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
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
    if isinstance(zero, bool):  # the format before stages, in which true stands for stage 1
        zero = {"stage": int(zero)}
    zero, aio = _object("zero_optimization", zero, ZERO), _object("aio", aio, AIO)
    param = _object("zero_optimization.offload_param", _offload_param(zero), PARAM)
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
    unused = [f"zero_optimization.{name}" for name in sorted(zero.keys() & WITHOUT_MEANING)]
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


def _offload_param(zero: Mapping[str, Any]) -> Any:
    """The value of `offload_param`, also in its former spelling. Raises UserError for both spellings."""
    on_cpu = zero.get("cpu_offload_param")
    if on_cpu is not None and not isinstance(on_cpu, bool):
        raise UserError(f"zero_optimization.cpu_offload_param: got {on_cpu!r}, expected true or false")
    if not on_cpu:
        return zero.get("offload_param")
    if zero.get("offload_param") is not None:
        raise UserError(
            "zero_optimization: got cpu_offload_param and offload_param, which mean the same; leave cpu_offload_param "
            "out"
        )
    return {"device": "cpu"}


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
