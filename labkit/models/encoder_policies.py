"""One row per encoder: the layers of a BERT-like transformers model that the kernels replace.

Embeddings, pooler and heads stay transformers' own. Module names are relative to the base model, such as the BertModel
within a BertForMaskedLM.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from labkit.models.hf_config import read_bert, read_distilbert
from labkit.models.policy import Policy

BERT = Policy(
    architecture="BertModel",
    model_type="bert",
    read=read_bert,
    layers="encoder.layer",
    norm1="attention.output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attn_out="attention.output.dense",
    norm2="output.LayerNorm",
    ff1=("intermediate.dense",),
    ff2="output.dense",
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    embed_norm="embeddings.LayerNorm",
)
ROBERTA = replace(BERT, architecture="RobertaModel", model_type="roberta")
DISTILBERT = replace(
    BERT,
    architecture="DistilBertModel",
    model_type="distilbert",
    read=read_distilbert,
    layers="transformer.layer",
    norm1="sa_layer_norm",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attn_out="attention.out_lin",
    norm2="output_layer_norm",
    ff1=("ffn.lin1",),
    ff2="ffn.lin2",
)

ENCODERS: dict[str, Policy] = {policy.architecture: policy for policy in (BERT, ROBERTA, DISTILBERT)}


def encoder_policy_for(model: object) -> Policy | None:
    """The row of the model's base model; None: it has no row."""
    return ENCODERS.get(type(model.base_model).__name__) if isinstance(model, PreTrainedModel) else None
