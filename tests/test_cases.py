"""The functions that choose test cases contain what they promise."""

import itertools

import pytest
from cases import Case, covering, pairwise

GRIDS = [
    {"a": [0, 1], "b": ["x", "y", "z"]},
    {"a": list(range(5)), "b": [True, False], "c": [None, 1.5], "d": ["u", "v", "w"], "e": list(range(4))},
]


def pairs_of(row: dict) -> set:
    return set(itertools.combinations(sorted(row.items(), key=lambda entry: entry[0]), 2))


@pytest.mark.parametrize("choices", GRIDS)
def test_pairwise_rows_contain_every_pair_of_values(choices):
    rows = pairwise(**choices)
    every = {
        ((a, x), (b, y)) for a, b in itertools.combinations(sorted(choices), 2) for x in choices[a] for y in choices[b]
    }
    assert set().union(*map(pairs_of, rows)) == every
    assert rows == pairwise(**choices)
    two_largest = sorted(map(len, choices.values()))[-2:]
    assert len(rows) <= 1.3 * two_largest[0] * two_largest[1]


@pytest.mark.parametrize("choices", GRIDS)
def test_covering_rows_contain_every_value(choices):
    rows = pairwise(**choices)
    chosen = covering(rows)
    assert all(row in rows for row in chosen)
    for name, values in choices.items():
        assert {row[name] for row in chosen} == set(values), name
    assert len(chosen) <= max(map(len, choices.values())) + 1


def test_covering_rows_contain_every_value_of_the_named_pairs():
    choices = GRIDS[-1]
    chosen = covering(pairwise(**choices), ("b", "d"), ("b", "c"))
    for one, other in (("b", "d"), ("b", "c")):
        found = {(row[one], row[other]) for row in chosen}
        assert found == set(itertools.product(choices[one], choices[other]))


def test_cases_print_only_the_fields_that_differ_from_the_defaults():
    assert str(Case()) == ""
    assert str(Case(length=61, segment_lengths=(7, 13), is_causal=True)) == (
        "length=61,segment_lengths=(7,13),is_causal=True"
    )
