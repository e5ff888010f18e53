"""LongNet models: a decoder for language modeling, an encoder, and an encoder of whole slides."""

from ringjax.models.attention_map import AttentionMap
from ringjax.models.config import LongNetConfig
from ringjax.models.heatmap import save_heatmap
from ringjax.models.layer_decay import layer_decay
from ringjax.models.loss import next_token_targets, token_loss
from ringjax.models.model import LongNetDecoder, LongNetEncoder
from ringjax.models.slide import SlideEncoder
from ringjax.models.torchscale import from_torchscale

__all__ = [
    "AttentionMap",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetEncoder",
    "SlideEncoder",
    "from_torchscale",
    "layer_decay",
    "next_token_targets",
    "save_heatmap",
    "token_loss",
]
