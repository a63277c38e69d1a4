"""Options that decoders have and encoders lack."""

from labkit.engine.options import Options
from labkit.engine.without_kernels import refuse_checkpoints
from labkit.system.errors import UnsupportedError, UserError


def refuse_what_encoders_lack(options: Options, architecture: str) -> None:
    """Raises ValueError for options that have no meaning for an encoder."""
    if options.kv_dtype is not None:
        raise UserError("kv_dtype is for the cache of a decoder, an encoder keeps none; leave it out")
    if options.offload is not None:
        raise UnsupportedError("offload is for the layers of a decoder, and this is an encoder; leave it out")
    if options.kv_offload is not None:
        raise UserError("kv_offload is for the cache of a decoder, an encoder keeps none; leave it out")
    if options.pipeline_parallel.stages > 1:
        raise UnsupportedError(
            "pipeline_parallel is for the layers of a decoder, and this is an encoder; cut it with tensor_parallel"
        )
    if options.enable_cuda_graph or options.dependent_launch:
        raise UnsupportedError("enable_cuda_graph and dependent_launch are for decode steps, an encoder has none")
    if options.quant.lm_head:
        raise UserError("quant.lm_head: an encoder's head stays transformers' own; leave it out")
    refuse_checkpoints(options, architecture)
