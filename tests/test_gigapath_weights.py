"""Loading the weights of Prov-GigaPath: wrappers, extra arrays, and errors in one line."""

import jax.numpy as jnp
import numpy as np
import pytest
import torchscale_reference as reference
from cases import error
from flax import nnx

from ringjax.models import SlideEncoder

WEIGHTS = reference.gigapath_weights(num_layers=1, features=32, hidden=16, input_features=8)
Q_BIAS = "encoder.layers.0.self_attn.q_proj.bias"


class Tensor:
    """What is used of a PyTorch tensor."""

    def __init__(self, x, dtype="torch.float32"):
        self.x, self.dtype = x, dtype

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.x)

    def __array__(self, dtype=None, copy=None):
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.asarray(self.x, dtype)


class Untouchable:
    """A table that is too large to convert."""

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("this array is not needed")


def parameters(encoder):
    return nnx.to_pure_dict(nnx.state(encoder, nnx.Param))


@pytest.mark.parametrize(
    "state_dict",
    [
        {"model": WEIGHTS},
        {f"slide_encoder.{name}": x for name, x in WEIGHTS.items()},
        {name: Tensor(x, "torch.bfloat16" if "bias" in name else "torch.float32") for name, x in WEIGHTS.items()},
    ],
    ids=["wrapped", "prefix", "tensors"],
)
def test_all_forms_of_a_state_dict_give_the_same_parameters(state_dict):
    expected = SlideEncoder.from_gigapath(WEIGHTS)
    loaded = SlideEncoder.from_gigapath(state_dict)
    assert nnx.graphdef(loaded) == nnx.graphdef(expected)
    for found, wanted in zip(*(nnx.to_flat_state(nnx.state(x)) for x in (loaded, expected)), strict=True):
        assert found[0] == wanted[0] and error(found[1][...], wanted[1][...]) == 0


def test_arrays_of_pretraining_and_heads_are_listed_and_not_read():
    extra = ["mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.bias", "pos_embed", "decoder_pos_embed"]
    encoder = SlideEncoder.from_gigapath(WEIGHTS | dict.fromkeys(extra, Untouchable()))
    assert encoder.unused_weights == tuple(sorted(extra))
    head = {f"slide_encoder.{name}": x for name, x in WEIGHTS.items()} | {"classifier.0.weight": Untouchable()}
    assert SlideEncoder.from_gigapath(head).unused_weights == ("classifier.0.weight",)


def test_parameters_have_their_own_dtype():
    encoder = SlideEncoder.from_gigapath(WEIGHTS, dtype=jnp.bfloat16)
    assert encoder.config.dtype == jnp.bfloat16
    assert {x[...].dtype for _, x in nnx.to_flat_state(nnx.state(encoder))} == {jnp.dtype("float32")}
    half = SlideEncoder.from_gigapath(WEIGHTS, param_dtype=jnp.bfloat16)
    assert {x[...].dtype for _, x in nnx.to_flat_state(nnx.state(half))} == {jnp.dtype("bfloat16")}


def changed(**changes):
    """Returns the weights with other values; those set to None are removed."""
    names = {name.replace("/", "."): x for name, x in changes.items()}
    return {name: x for name, x in (WEIGHTS | names).items() if x is not None}


VIT = {"blocks.0.attn.qkv.weight": np.ones((3, 3)), "patch_embed.proj.weight": np.ones((3, 3, 2, 2))}


@pytest.mark.parametrize(
    ("state_dict", "text"),
    [
        (None, "`state_dict` must be a Mapping, got None"),
        ({}, "must be that of Prov-GigaPath's slide encoder, .* got 0 of 0"),
        (VIT, r"must be that of Prov-GigaPath's slide encoder, .* got 0 of 2: \['blocks"),
        ({"model": VIT}, "must be that of Prov-GigaPath's slide encoder"),
        (
            changed(**{"patch_embed/proj/weight": np.ones((8, 8, 1, 1))}),
            "a matrix 'patch_embed.proj.weight', got shape",
        ),
        (changed(**{"patch_embed/proj/weight": None}), "a matrix 'patch_embed.proj.weight', got no such array"),
        (changed(**{"norm/bias": None}), r"unknown \[\], missing \['norm.bias'\]"),
        (
            changed(**{"encoder/layers/0/self_attn/xpos/scale": np.ones(2)}),
            r"unknown \['encoder.layers.0.self_attn.xpos",
        ),
        (changed(**{"norm/bias": np.ones(33)}), r"expects {'norm.bias': \(32,\)}, got {'norm.bias': \(33,\)}"),
        (changed(cls_token=np.ones((1, 1, 31))), r"expects {'cls_token': \(1, 1, 32\)}"),
        (changed(**{Q_BIAS: np.full(32, np.nan)}), rf"finite arrays, got NaN or infinity in \['{Q_BIAS}'\]"),
        (changed(**{Q_BIAS: "x"}), f"arrays of real numbers, got str for '{Q_BIAS}'"),
    ],
)
def test_unsuitable_weights_raise_one_line(state_dict, text):
    with pytest.raises(ValueError, match=text) as caught:
        SlideEncoder.from_gigapath(state_dict)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 5}, "`num_heads` must divide the 32 features .* got 5"),
        ({"num_heads": 0}, "`num_heads` must be at least 1"),
        (
            {"features": 64, "sub_norm": False},
            "determined by `state_dict` must not be given, got `features` 64, `sub_norm`",
        ),
        ({"dtype": "int32"}, "`dtype` must be"),
        ({"ring": 4}, "`ring` must be"),
        ({"pattern": (1024, 1)}, "`pattern` must be"),
        ({"dropout_rate": 1.5}, "`dropout_rate` must be"),
    ],
)
def test_bad_options_raise(options, text):
    with pytest.raises(ValueError, match=text):
        SlideEncoder.from_gigapath(WEIGHTS, **options)
