"""Methods: how attention becomes a rollout matrix. Pure array functions; no model is ever seen here.

Attention is (layer, batch, head, query, key): a row belongs to a query and sums to 1 over the keys;
layer 0 is next to the input. NumPy in gives NumPy out, torch in gives torch out, float64 is kept and
half precision is accumulated in float32.
"""

from audit.methods.encoder_decoder import encoder_decoder_relevance, encoder_decoder_rollout
from audit.methods.flow import attention_flow
from audit.methods.gradient import gradient_rollout
from audit.methods.per_head import per_head_rollout
from audit.methods.rollout import attention_rollout, raw_attention
from audit.methods.two_stream import two_stream_relevance

__all__ = [
    "attention_flow",
    "attention_rollout",
    "encoder_decoder_relevance",
    "encoder_decoder_rollout",
    "gradient_rollout",
    "per_head_rollout",
    "raw_attention",
    "two_stream_relevance",
]
