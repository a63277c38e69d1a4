"""Tensor parallelism for transformers models in plain torch, without a kernel policy.

    plan = plan_slicing(model, tp_size=2)  # or with DeepSpeed's injection_policy={T5Block: ("SelfAttention.o", ...)}
    print(plan)
    sliced = slice_model(model, plan, rank, group)

planner -> sources (which matrices) -> trace (which linears feed which) -> reading (what each head depends on) -> layout
(the cut) -> proof (whether it is right); sliced makes a rank's copy, for the proof and for the final model.
"""

from labkit.engine.parallel.slicing.parallel import slice_model as slice_model
from labkit.engine.parallel.slicing.parallel import tensor_parallel_model as tensor_parallel_model
from labkit.engine.parallel.slicing.plan import BlockPlan as BlockPlan
from labkit.engine.parallel.slicing.plan import Kind as Kind
from labkit.engine.parallel.slicing.plan import Role as Role
from labkit.engine.parallel.slicing.plan import RoleSource as RoleSource
from labkit.engine.parallel.slicing.plan import SlicingPlan as SlicingPlan
from labkit.engine.parallel.slicing.plan import Unit as Unit
from labkit.engine.parallel.slicing.planner import plan_slicing as plan_slicing
