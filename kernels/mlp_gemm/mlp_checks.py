"""Checks of the weights of an MLP, see `checks.checked`."""

from labkit.system.errors import UserError
from labkit.system.rounding import BLOCK

from ..checks import ArgumentCheck, flag, linear, norm, record
from ..types import ACTIVATIONS, PLAIN_ACTIVATIONS, Linear, MlpWeights


def _mlp(name: str, weights: MlpWeights, call: ArgumentCheck) -> None:
    """Checks the weights of region 3, and sets `act` to the number of its outputs."""
    linear(f"{name}.up", up := weights.up, call)
    norm(f"{name}.norm", weights.norm, call)
    norm(f"{name}.addend_norm", weights.addend_norm, call)
    call.one_of(f"{name}.activation", weights.activation, ACTIVATIONS)
    flag(f"{name}.gated", weights.gated, call)
    if not weights.gated:
        call.one_of(f"{name}.activation of an MLP without a gate", weights.activation, PLAIN_ACTIVATIONS)
    block = BLOCK if call.impl == "cpp" else 2
    call.sizes |= {"act": up.outputs // (2 if weights.gated else 1), "act padding": block // 2 if weights.gated else 1}
    if weights.gated and up.outputs % block:
        raise UserError(
            f"got {name}.up.outputs = {up.outputs} of a gated matrix, expected a multiple of {block}; "
            "gemm.interleave_gate makes the C++ kernels' matrix"
        )
    if call.impl == "cpp" and up.bias is not None and len(up.bias) % BLOCK:
        raise UserError(
            f"{name}.up.bias: got {len(up.bias)} numbers, expected whole blocks of {BLOCK}; use gemm.packed"
        )


def _down(name: str, down: Linear, call: ArgumentCheck) -> None:
    """Checks the second matrix of an MLP against the first one."""
    linear(name, down, call)
    act, padding = call.sizes["act"], call.sizes["act padding"]
    if not down.inputs <= act < down.inputs + padding:
        raise UserError(f"got {name}.inputs = {down.inputs}, expected {act}: the outputs of the first matrix")


mlp_weights, mlp_down = record(MlpWeights, _mlp), record(Linear, _down)
