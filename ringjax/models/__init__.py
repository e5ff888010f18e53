"""LongNet models: a decoder for language modeling and an encoder."""

from ringjax.models.config import LongNetConfig
from ringjax.models.loss import next_token_targets, token_loss
from ringjax.models.model import LongNetDecoder, LongNetEncoder
from ringjax.models.torchscale import from_torchscale

__all__ = ["LongNetConfig", "LongNetDecoder", "LongNetEncoder", "from_torchscale", "next_token_targets", "token_loss"]
