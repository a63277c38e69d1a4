"""Models that transformers runs, on two ranks."""

from typing import Any

import torch
import torch.distributed as dist
from helpers.models.any_models import any_model, texts
from helpers.models.sliced_models import padded_batch, seeded
from transformers.models.t5.modeling_t5 import T5Block

import labkit
from labkit.engine.injected.modules import InjectedModule

NEW = 8


def without_a_row(folder: str) -> dict[str, bool]:
    """Whether models that transformers runs give the outputs of the whole model: a T5, cut with and without an
    injection policy, a BERT, and mixtures of experts in memory and in a folder, which is made in `folder`.
    """
    t5, bert = seeded("t5"), seeded("bert")
    equal = {}
    for policy in ({T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}, None):
        cut = labkit.init_inference(t5, tensor_parallel={"tp_size": 2}, injection_policy=policy)
        inputs = {name: tensor for name, tensor in padded_batch("t5").items() if not name.startswith("decoder")}
        torch.manual_seed(1)
        expected = t5.generate(**inputs, max_new_tokens=NEW, do_sample=True, top_k=0)
        torch.manual_seed(1 + dist.get_rank())
        equal[f"T5, policy {policy is not None}"] = torch.equal(
            expected, cut.generate(**inputs, max_new_tokens=NEW, do_sample=True, top_k=0)
        )
    cut = labkit.init_inference(bert, tensor_parallel={"tp_size": 2})
    cut.profile_model_time()
    with torch.no_grad():
        expected, actual = (model(**padded_batch("bert"))[0] for model in (bert, cut))
    equal["BERT"] = torch.allclose(expected, actual, atol=1e-4) and len(cut.model_times()) == 1
    for name in ("olmo2", "gpt_oss", "phimoe"):
        changes: dict[str, Any] = {"swiglu_limit": 6.0} if name == "gpt_oss" else {}  # its row has the published limit
        model = any_model(name, **changes)
        cut = labkit.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": 2})
        packed = [part for part in cut.module.modules() if isinstance(part, InjectedModule)]
        equal[name] = torch.equal(texts(cut), texts(model)) and cut.level == "hooks" and len(packed) > 3
    model.save_pretrained(f"{folder}/experts")  # rank 0 writes
    dist.barrier()
    cut = labkit.init_inference(f"{folder}/experts", dtype=torch.float32, tensor_parallel={"tp_size": 2})
    equal["folder"] = torch.equal(texts(cut), texts(model))
    cut = labkit.init_inference(any_model("phimoe"), dtype=torch.int8, tensor_parallel={"tp_size": 2})
    equal["int8"] = all(matrix.scales is not None for matrix in cut.module.model.layers[0].mlp.experts.matrices)
    return equal
