from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.residual import Residual
from spheroid_node.wire.tensors import decode_vector, encode_vector

history = st.lists(
    st.tuples(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(history)
def test_nothing_learnt_is_lost(history: list[tuple[list[float], bool]]) -> None:
    """Without decay, what was learnt is what versions contain and what is left over, whoever failed."""
    residual = Residual(4, decay=1.0)
    learnt, contained = np.zeros(4), np.zeros(4)
    for values, accepted in history:
        update = np.array(values, dtype=np.float32)
        sent = residual.add_to(update)
        delivered = decode_vector(encode_vector(sent, "fp16"), "fp16")
        residual.settle(sent, delivered, accepted)
        learnt += update
        contained += delivered * accepted
    np.testing.assert_allclose(contained + residual.vector, learnt, atol=1e-4)


def test_an_accepted_update_leaves_only_the_error_of_its_compression() -> None:
    residual = Residual(2)
    sent = np.array([1.0001, 3.0], dtype=np.float32)
    delivered = decode_vector(encode_vector(sent, "fp16"), "fp16")
    residual.settle(sent, delivered, accepted=True)
    assert residual.vector.tolist() == [sent[0] - delivered[0], 0.0]
    assert residual.vector[0] != 0


def test_an_update_that_was_not_taken_fades() -> None:
    residual = Residual(1, decay=0.5)
    one = np.array([1.0], dtype=np.float32)
    residual.settle(one, one, accepted=False)
    assert residual.vector.tolist() == [0.5]
    sent = residual.add_to(np.zeros(1, dtype=np.float32))
    residual.settle(sent, sent, accepted=False)
    assert residual.vector.tolist() == [0.25]


def test_what_is_not_finite_does_not_stay() -> None:
    residual = Residual(3)
    sent = np.array([np.nan, np.inf, 1.0], dtype=np.float32)
    residual.settle(sent, sent, accepted=False)
    assert residual.vector.tolist() == [0.0, 0.0, np.float32(0.9)]
