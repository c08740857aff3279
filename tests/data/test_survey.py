"""Which documents are held out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.data.corpus import Piece
from mdsp.data.survey import Survey, Surveyor, hold_out
from mdsp.errors import DataError


def survey(texts: Sequence[str]) -> Survey:
    surveyor = Surveyor()
    for _ in surveyor.watch(Piece(text, True, "test") for text in texts):
        pass
    return surveyor.result()


def test_sizes_and_pieces() -> None:
    whole = survey(["one", "zwölf"])
    assert (whole.documents, whole.text_bytes) == (2, 9)
    surveyor = Surveyor()
    parts = [Piece("o", False, ""), Piece("ne", True, ""), Piece("zw", False, ""), Piece("ölf", True, "")]
    assert list(surveyor.watch(parts)) == parts
    assert surveyor.result().source_hash == whole.source_hash
    assert survey(["zwölf", "one"]).source_hash != whole.source_hash
    assert survey(["onezwölf"]).source_hash != whole.source_hash


def test_nothing_is_held_out_unless_asked() -> None:
    assert not hold_out(survey(["a"]), 0.0).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=60), st.floats(0.001, 0.999))
def test_the_two_sides_share_no_text_and_neither_is_empty(texts: list[str], fraction: float) -> None:
    if len(set(texts)) < 2:
        with pytest.raises(DataError, match="whole documents"):
            hold_out(survey(texts), fraction)
        return
    held_out = hold_out(survey(texts), fraction)
    valid = {text for text, out in zip(texts, held_out, strict=True) if out}
    train = {text for text, out in zip(texts, held_out, strict=True) if not out}
    assert valid
    assert train
    assert not valid & train


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=9), min_size=20, max_size=60, unique=True))
def test_the_fraction_is_met_and_the_choice_depends_on_the_texts_only(texts: list[str]) -> None:
    held_out = hold_out(survey(texts), 0.25)
    assert held_out.sum() == round(0.25 * len(texts))
    shuffled = sorted(texts, key=lambda text: text[::-1])
    again = hold_out(survey(shuffled), 0.25)
    assert {t for t, out in zip(texts, held_out, strict=True) if out} == {
        t for t, out in zip(shuffled, again, strict=True) if out
    }
