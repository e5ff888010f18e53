"""The table of bad inputs, continued: layers and models."""

import functools
import types

import numpy as np
from bad_inputs import (
    BLOCK_SIZES,
    BOOLS,
    CHOICES,
    COUNTS,
    DETACHED,
    DTYPES,
    FLOATS,
    HEATS,
    HUGE,
    IDS,
    KEYS,
    LENGTHS,
    LISTS,
    LONG,
    NAN,
    PATTERN,
    RATES,
    RINGS,
    ROWS,
    SCALES,
    TOKENS,
    Also,
    Q,
    bad,
    blocks,
    made,
)
from cases import ring_mesh
from flax import nnx

import ringjax as rj
import ringjax.linen
import ringjax.nnx
from ringjax._src.flax.rotary import rotary, xpos
from ringjax.models import (
    LongNetConfig,
    LongNetDecoder,
    LongNetEncoder,
    from_torchscale,
    next_token_targets,
    token_loss,
)


@functools.cache
def rngs():
    return nnx.Rngs(0)


def layer(num_heads=4, in_features=16, pattern=PATTERN, **keywords):
    return rj.nnx.DilatedSelfAttention(num_heads, in_features, pattern, **{"rngs": rngs()} | keywords)


X = np.zeros((2, 8, 16), np.float32)


def linen(num_heads=4, pattern=PATTERN, x=X, call=None, **keywords):
    made = rj.linen.DilatedSelfAttention(num_heads, pattern, **keywords)
    return made.apply({}, x, **call or {})


for name, call in {"nnx": layer, "linen": linen}.items():  # an error in linen takes 20 ms: it has fewer rows
    bad(name, call, num_heads=[*COUNTS, 3, HUGE], pattern=[None, (4, 8)], num_kv_heads=[*COUNTS, 3], ring=RINGS)
    bad(name, call, head_dim=[*COUNTS, HUGE, Also(7, {"positions": "rotary"})], out_features=[*COUNTS, HUGE])
    bad(name, call, positions=CHOICES, is_causal=BOOLS, sub_norm=BOOLS, sinks=BOOLS)
    bad(name, call, sinks=[Also(True, {"pattern": DETACHED})])
    bad(name, call, {"positions": "is_causal"}, positions=["xpos"])
    bad(name, call, norm_epsilon=[-1, 0, *FLOATS], dropout_rate=RATES, deterministic=BOOLS, use_bias=BOOLS)
    bad(name, call, dtype=DTYPES, param_dtype=[*DTYPES, None], implementation=CHOICES, kernel_init=[None, "x"])
    bad(name, call, bias_init=[None, 0.0])
ROWS[:] = [row for i, row in enumerate(ROWS) if row.function != "linen" or i % 3 == 0]
bad("nnx", layer, in_features=[*COUNTS, 15, HUGE], rngs=[None, 0, "x"])


MODULES: dict[str, nnx.Module] = {}


def abstract(name, make, **keywords):
    """A layer or model of shapes, made once: bad inputs are refused before its parameters are read."""
    if name not in MODULES:
        MODULES[name] = nnx.eval_shape(lambda: make(**keywords, rngs=nnx.Rngs(0)))
    return MODULES[name]


def call_layer(x=X, **keywords):
    options = {"is_causal": True, "positions": "rotary", **keywords.pop("layer", {})}
    return abstract(f"layer {options}", layer, **options)(x, **keywords)


INPUTS = [np.float32(1), [[1.0]], "x", 3, np.zeros(16, np.float32), X[..., :8], X[:0], X[:, :0], X.astype(int), None]
POSITIONS = [[0], 3, np.zeros((2, 8)), np.zeros(4, int), np.zeros((3, 8), int), np.full(8, 2**40), np.zeros(8, bool)]
SEGMENTS = {"segment_ids": IDS, "seq_len": [*COUNTS[:6], 9]}
bad("nnx call", call_layer, x=INPUTS, positions=POSITIONS, deterministic=["no", 1], **SEGMENTS)
bad("nnx call", lambda **k: call_layer(layer={"dropout_rate": 0.5}, **k), rngs=[None, *KEYS])
bad("nnx call", lambda **k: call_layer(layer={"positions": None}, **k), positions=[np.arange(8)])
bad("linen call", lambda x: linen(x=x), x=[i for i in INPUTS if getattr(i, "shape", ())[-1:] != (8,)])
bad("linen call", lambda **k: linen(positions="rotary", call=k), positions=POSITIONS, deterministic=["no", 1])
bad("linen call", lambda **k: linen(is_causal=True, call=k), segment_ids=IDS, seq_len=[*COUNTS[:6], 9])
bad("linen call", lambda **k: linen(dropout_rate=0.5, call=k), dropout_rng=KEYS)


def layer_prefill(x=X, lengths=None, **keywords):
    given = keywords.pop("cache") if "cache" in keywords else made()
    return abstract("causal", layer, is_causal=True).prefill(x, given, lengths)


def layer_extend(x=X, counts=None, **keywords):
    given = keywords.pop("cache") if "cache" in keywords else made()
    return abstract("causal", layer, is_causal=True).extend(x, given, counts)


OTHER = [None, "x", lambda: made(pattern=rj.DilationPattern((4,), (1,)))]
bad("nnx prefill", layer_prefill, x=INPUTS, lengths=LENGTHS, cache=OTHER)
bad("nnx extend", layer_extend, x=INPUTS, counts=LENGTHS, cache=OTHER)


def fn(pattern=PATTERN, **keywords):
    return rj.attention_fn(pattern, **keywords)


bad("attention_fn", fn, pattern=[None, (4, 8)], is_causal=BOOLS, seq_len=COUNTS, scale=SCALES, ring=RINGS)
bad("attention_fn", fn, implementation=CHOICES, block_sizes=[*BLOCK_SIZES, Also(blocks, {"implementation": "xla"})])
FLAT = Q[0, 0]
bad("attention_fn call", lambda **k: fn()(**{"query": Q, "key": Q, "value": Q} | k), query=[FLAT, "x", [1.0]])
bad("attention_fn call", lambda **k: fn()(Q, Q, Q, **k), bias=[Q], mask=[Q], module=["x"], precision=["highest", 3])
bad("attention_fn call", lambda **k: fn()(Q, Q, Q, **k), is_causal=[True, "no"], dropout_rate=RATES, dtype=DTYPES)
bad("attention_fn call", lambda **k: fn()(Q, Q, Q, dropout_rate=0.5, broadcast_dropout=False, **k),
    dropout_rng=[None, *KEYS], deterministic=["no", 1])  # fmt: skip
bad("attention_fn call", lambda **k: fn()(Q, Q, Q, dropout_rate=0.5, **k), broadcast_dropout=[True, "no"])

AT = np.arange(8)
ROTARY = [[[1.0]], "x", Q[0], Q[..., :3], Q.astype(int), Q[:0], None]
bad("rotary", lambda x=Q, positions=AT, **k: rotary(x, positions, **k), x=ROTARY, positions=POSITIONS,
    base=[0, -1, 0.5, *FLOATS])  # fmt: skip
bad("xpos", lambda query=Q, key=Q, positions=AT, **k: xpos(query, key, positions, **{"length": 8} | k),
    query=[*ROTARY, Q.astype(np.float16)], key=[*ROTARY, Q.astype(np.float16)], length=[*COUNTS, 65_537],
    positions=[*POSITIONS, AT + 1, AT - 1], base=[0, *FLOATS], scale_base=[0, -1, *FLOATS])  # fmt: skip


# models
def config(**keywords):
    sizes = {"num_layers": 1, "features": 16, "num_heads": 4, "vocab_size": 16, "pattern": PATTERN}
    return LongNetConfig(**sizes | keywords)


for size in ("num_layers", "features", "num_heads", "vocab_size", "num_kv_heads", "head_dim", "hidden_features"):
    bad("LongNetConfig", config, **{size: [*COUNTS, HUGE]})
bad("LongNetConfig", config, input_features=[*COUNTS, HUGE], num_heads=[3], num_kv_heads=[3], positions=CHOICES)
bad("LongNetConfig", config, sinks=[*BOOLS, Also(True, {"pattern": DETACHED})])
bad("LongNetConfig", config, head_dim=[3, 7], sub_norm=BOOLS, use_bias=BOOLS, tie_embeddings=BOOLS, remat=BOOLS)
bad("LongNetConfig", config, final_norm=BOOLS, dropout_rate=RATES, drop_path_rate=RATES, rows_at_once=COUNTS)
bad("LongNetConfig", config, scan_layers=BOOLS, norm_epsilon=[-1, 0, *FLOATS], attention_dropout_rate=RATES)
bad("LongNetConfig", config, dtype=DTYPES, param_dtype=[*DTYPES, None], pattern=[None, (4, 8)])
for preset in ("tiny", "small", "base", "large", "gigapath"):
    bad(preset, getattr(LongNetConfig, preset), num_layers=[0], dtype=["int32"], norm_epsilon=[NAN])


def decoder(config=None, **keywords):
    return LongNetDecoder(sizes() if config is None else config, **{"rngs": rngs()} | keywords)


def encoder(config=None, **keywords):
    return LongNetEncoder(sizes() if config is None else config, **{"rngs": rngs()} | keywords)


sizes = config


for name, make in {"LongNetDecoder": decoder, "LongNetEncoder": encoder}.items():
    bad(name, make, config=["tiny", {}, 3], ring=RINGS, rngs=[None, 0, "x"])
bad("LongNetEncoder", encoder, {"config": "rows_at_once"},
    config=[Also(lambda: sizes(rows_at_once=4), {"ring": lambda: rj.Ring(ring_mesh(2))})])  # fmt: skip
bad("LongNetDecoder", decoder, {"config": "vocab_size"}, config=[lambda: sizes(vocab_size=None)])
bad("LongNetEncoder", encoder, {"config": "vocab_size"}, config=[lambda: sizes(input_features=4)])
GOOD = np.zeros((2, 8), int)


def decode(tokens=GOOD, **keywords):
    return abstract("decoder", decoder)(tokens, **keywords)


def encode(inputs=GOOD, **keywords):
    return abstract("encoder", encoder)(inputs, **keywords)


def stream(inputs):
    return abstract("stream", encoder, config=sizes(vocab_size=None))(inputs)


CALL = {"positions": POSITIONS, "dropout_rng": KEYS, **SEGMENTS}
bad("decoder call", decode, tokens=TOKENS, **CALL)
bad("encoder call", encode, inputs=TOKENS, pool=[1, 0, "yes", None], **CALL)
bad("encoder call", stream, inputs=[*INPUTS, GOOD, np.zeros((8, 16), np.float32)])


def of_decoder(method, **defaults):
    return lambda **k: getattr(abstract("decoder", decoder), method)(**defaults | k)


bad("init_caches", of_decoder("init_caches", batch=2, max_len=16), batch=[*COUNTS, HUGE], max_len=[*COUNTS, HUGE])
bad("decoder prefill", of_decoder("prefill", tokens=GOOD, max_len=16), tokens=TOKENS, max_len=[*COUNTS, 4, HUGE])
bad("decoder prefill", of_decoder("prefill", tokens=GOOD, max_len=16), lengths=LENGTHS)
CACHES = [None, (), "x", 3, (1,), lambda: (made(), made())]
bad("decoder extend", lambda **k: of_decoder("extend")(**{"tokens": GOOD, "caches": (made(),)} | k), tokens=TOKENS)
bad("decoder extend", lambda **k: of_decoder("extend")(**{"tokens": GOOD, "caches": (made(),)} | k), counts=LENGTHS)
bad("decoder extend", of_decoder("extend", tokens=GOOD), caches=CACHES)
draw = of_decoder("generate", prompt=GOOD, num_tokens=2)
bad("decoder generate", lambda **k: draw(greedy=True, **k), prompt=[*TOKENS, GOOD - 1, GOOD + 16, np.uint8(GOOD + 16)])
bad("decoder generate", lambda **k: draw(greedy=True, **k), num_tokens=[*COUNTS, HUGE], max_len=[*COUNTS, 4, HUGE])
bad("decoder generate", lambda **k: draw(greedy=True, **k), lengths=[*LENGTHS, [0, 1]], top_k=[2], temperature=[0.5])
bad("decoder generate", draw, rng=[None, *KEYS])
bad("decoder generate", lambda **k: draw(rng=np.zeros(2, np.uint32), **k), temperature=HEATS, top_k=[*COUNTS, 17])
bad("decoder generate", draw, greedy=BOOLS)

bad("next_token_targets", lambda **k: next_token_targets(**{"tokens": GOOD} | k),
    tokens=TOKENS[1:], **SEGMENTS)  # fmt: skip
bad("next_token_targets", next_token_targets, tokens=[[[2**40]], "x", None, [[0.5]], [[1], [1, 2]]])
LOGITS, ONES = np.zeros((2, 8, 16), np.float32), np.ones((2, 8), np.float32)
bad("token_loss", lambda **k: token_loss(**{"logits": LOGITS, "targets": GOOD, "weights": ONES} | k),
    logits=[[1.0], None, LOGITS[0], LOGITS.astype(int), LOGITS[:, :4], LOGITS[:0], LOGITS[..., :0]],
    targets=[[0], None, GOOD[:, :4], ONES, LONG, -LONG, GOOD[0]],
    weights=[[1.0], None, ONES[:, :4], ONES.astype(complex), "x"])  # fmt: skip


def torchscale(**keywords):
    shapes = {f"self_attn.{x}_proj": (8, 8) for x in ("q", "k", "v", "out")}
    shapes |= {"ffn.fc1": (32, 8), "ffn.fc2": (8, 32), "self_attn_layer_norm": (8,), "final_layer_norm": (8,)}
    weights = {f"encoder.layers.0.{name}.weight": np.ones(shape) for name, shape in shapes.items()}
    weights |= {f"encoder.layers.0.{name}.bias": np.ones(shape[:1]) for name, shape in shapes.items()}
    weights |= {f"encoder.layer_norm.{name}": np.ones(8) for name in ("weight", "bias")}
    given = {"state_dict": weights, "segment_lengths": (4, 16), "dilation_rates": (1, 2), "num_heads": 2} | keywords
    if isinstance(keywords.get("state_dict"), types.LambdaType):
        given["state_dict"] = keywords["state_dict"](weights)
    return from_torchscale(**given)


bad("from_torchscale", torchscale, state_dict=[None, {}, [1], "x", {"a": 1}, {1: 2}], kind=["other", 1])
bad("from_torchscale", torchscale, segment_lengths=LISTS[:6], dilation_rates=LISTS[:6], num_heads=[*COUNTS, 3])
bad("from_torchscale", torchscale, accept_misplaced=BOOLS)
bad("from_torchscale", torchscale, ring=RINGS, dtype=["int32"], norm_epsilon=[0, NAN], features=[8])
