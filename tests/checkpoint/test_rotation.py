"""Which checkpoints stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mdsp.checkpoint.rotation import superfluous

steps = st.sets(st.integers(0, 1000))


@given(steps, st.integers(1, 20), st.integers(0, 50))
def test_the_newest_and_the_multiples_stay(present: set[int], keep_last: int, keep_every: int) -> None:
    gone = set(superfluous(present, keep_last, keep_every))
    kept = present - gone
    newest = set(sorted(present, reverse=True)[:keep_last])
    assert gone <= present
    assert kept == newest | {step for step in present if keep_every and step % keep_every == 0}


@given(steps, st.integers(0, 50))
def test_all_stay_unless_asked(present: set[int], keep_every: int) -> None:
    assert superfluous(present, 0, keep_every) == []
