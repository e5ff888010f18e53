"""The options of `examples/train_lm.py`: values that make no sense are one line, before anything is computed."""

import jax
import pytest
import train_lm

COUNTS = "layers features heads segments rates batch accumulate steps warmup eval-batches data tensor keep log-every"
FROM_0 = "kv-heads eval-every ring devices save-every sample-bytes weight-decay seed"
INTS = f"{COUNTS} kv-heads eval-every ring devices save-every sample-bytes seq-len num-processes process-id"

REFUSED = [
    *((name, "0", "at least 1") for name in COUNTS.split()),
    *((name, "-1", "at least 0") for name in FROM_0.split()),
    *((name, str(2**31), "at most 2147483647") for name in INTS.split()),
    *((name, value, "above 0") for name in ("learning-rate", "clip") for value in ("0", "-1")),
    *((x, y, "a finite number") for x in ("learning-rate", "clip", "weight-decay") for y in ("nan", "inf", "-inf")),
    ("seq-len", "1", "at least 2"),
    ("seed", str(2**32), "at most 4294967295"),
    ("num-processes", "0", "at least 1"),
    ("process-id", "-2", "at least -1"),
    ("rates", "1,0", "at least 1"),
    *(("dtype", x, "one of auto, float32, bfloat16, float16") for x in ("int32", "float64", "float33", "", "bool")),
    *(
        ("coordinator", x, "HOST:PORT")
        for x in ("nonsense", "host:", ":1", "host:0", "host:65536", "a:b", "::1:5", "h:1 ")
    ),
    ("out", "", "the name of a folder"),
    ("out", "r\udcfcns", "a name that this locale can decode"),
    ("profile", "r\udcfcns", "a name that this locale can decode"),
]


@pytest.mark.parametrize(("option", "value", "rule"), REFUSED)
def test_values_out_of_range_are_refused_in_one_line(option, value, rule, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_lm, "run", lambda config: 0)
    assert train_lm.main([f"--{option}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_lm: --{option} must be {rule}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", ["--num-processes=2", "--process-id=0", "--num-processes=2 --process-id=1"])
def test_numbers_of_processes_need_a_coordinator(options, capsys):
    assert train_lm.main(options.split()) == 2
    assert capsys.readouterr().err == "train_lm: --num-processes and --process-id require --coordinator\n"


@pytest.mark.parametrize("options", ["--steps=x", "--clip=", "--rates=1,x", "--segments=1.5", "--steps=" + "9" * 5000])
def test_values_of_another_type_are_refused_in_one_line(options, capsys):
    assert train_lm.main([options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_lm: argument {options.split('=')[0]}: invalid ")


def test_values_in_range_are_taken():
    given = (
        "--learning-rate=1e-30 --clip=0.5 --weight-decay=0 --seq-len=2 --seed=4294967295 --dtype=float16 --devices=0"
    )
    given += " --coordinator=[::1]:65535 --num-processes=2 --process-id=0 --rates=1,2"
    config = train_lm.parse(train_lm.Config, "", given.split())
    assert (config.clip, config.seed, config.coordinator, config.rates) == (0.5, 2**32 - 1, "[::1]:65535", (1, 2))
    assert jax.random.key_data(jax.random.key(config.seed)).tolist() == [0, 2**32 - 1]
    for name in ("host.example:1", "10.0.0.1:80", "node-1_a:9"):
        assert train_lm.parse(train_lm.Config, "", ["--coordinator", name]).coordinator == name


def test_ctrl_c_before_training_is_one_line(capsys, monkeypatch):
    def run(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lm, "run", run)
    assert train_lm.main([]) == 130
    assert capsys.readouterr().err == "train_lm: interrupted\n"
