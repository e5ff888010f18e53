import dataclasses
import functools

import pytest

import ringjax as rj

P = rj.DilationPattern


def test_is_a_value():
    a, b = P([4, 8], [1, 2]), P((4, 8), (1, 2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != P((4, 8), (1, 2), mixing="detached")
    assert a != P((4, 8), (1, 2), padding="zeros")
    assert a != P((8, 4), (2, 1))
    with pytest.raises(AttributeError):
        a.offsets = "none"


def test_repr_is_readable():
    assert repr(P((4, 8), (1, 2))) == "DilationPattern(4/1, 8/2)"
    text = repr(P((4,), (2,), offsets="block", mixing="detached"))
    assert text == "DilationPattern(4/2, offsets='block', mixing='detached')"
    assert repr(P((4,), (2,), padding="zeros")) == "DilationPattern(4/2, padding='zeros')"


def test_presets():
    assert P.longnet() == P((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    assert P.geometric(1024, 65536, 4) == P((1024, 4096, 16384, 65536), (1, 4, 16, 64))
    assert P.for_length(1048576) == P((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
    assert P.for_length(1_500_000) == P.for_length(1048576)
    assert P.for_length(700) == P((700,), (1,))
    assert P.for_length(64, first=9, branches=3) == P((9, 24, 64), (1, 2, 4))
    assert P.for_length(2**50 - 1).segment_lengths[-1] == 2**49
    assert P.for_length(64, first=16, branches=3, mixing="detached") == P((16, 32, 64), (1, 2, 4), mixing="detached")
    for preset in (P.longnet, functools.partial(P.for_length, 4096), functools.partial(P.geometric, 4, 16, 2)):
        assert preset(padding="zeros") == dataclasses.replace(preset(), padding="zeros")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((4, 30, 2), "`last` must be `first` times a power"),
        ((4, 8, 1), "`ratio` must be at least 2"),
        ((0, 8, 2), "`first` must be at least 1, got 0"),
    ],
)
def test_bad_presets(arguments, text):
    with pytest.raises(ValueError, match=text):
        P.geometric(*arguments)


def test_offsets_of_heads():
    assert P((8,), (3,)).branches(5)[0].offsets == (0, 1, 2, 0, 1)
    assert P((8,), (3,), offsets="block").branches(5)[0].offsets == (0, 0, 1, 1, 2)
    assert P((8,), (3,), offsets="none").branches(5)[0].offsets == (0,) * 5
    first, second = P((8, 8), (3, 3), heads="split").branches(5)
    assert (first.first_head, first.num_heads, first.offsets) == (0, 3, (0, 0, 0))
    assert (second.first_head, second.num_heads, second.offsets) == (3, 2, (1, 1))


def brute_force(pattern, heads, length):
    covered, reach = 0, 0
    for head in range(heads):
        for p in range(length):
            seen = []
            for b in pattern.branches(heads, length):
                if not b.first_head <= head < b.first_head + b.num_heads:
                    continue
                w, r, o = b.segment_length, b.rate, b.offsets[head - b.first_head]
                if p % w % r == o:
                    seen += [s for s in range(length) if s // w == p // w and s % w % r == o]
            covered += bool(seen)
            reach = max([reach, *(abs(p - s) for s in seen)])
    return covered / (heads * length), reach


@pytest.mark.filterwarnings("ignore:Branch")
@pytest.mark.parametrize("keywords", [{}, {"offsets": "block"}, {"offsets": "none"}, {"heads": "split"}])
@pytest.mark.parametrize(("heads", "length"), [(1, 12), (4, 40), (6, 37)])
def test_coverage(keywords, heads, length):
    pattern = P((6, 11, 40), (2, 5, 9), **keywords)
    got = pattern.coverage(heads, length)
    assert (got.share, got.reach) == pytest.approx(brute_force(pattern, heads, length))


def test_coverage_warns_of_unused_residues():
    with pytest.warns(UserWarning, match="2 heads use 2 of 4 residues"):
        got = P((4, 8), (1, 4)).coverage(num_heads=2)
    assert got.share == 1
    assert len(got.notes) == 1
    assert P((4, 8), (1, 4)).coverage(num_heads=4).notes == ()
