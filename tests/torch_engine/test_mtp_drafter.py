"""Drafts of an MTP head over the torch engine, by tests of the reference engine."""

import pytest

from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_mtp_drafter import (  # noqa: E402
    folder,  # noqa: F401
    opens,  # noqa: F401
    ring,  # noqa: F401
    test_a_head_shares_the_embedding_of_the_model,  # noqa: F401
    test_a_head_that_is_right_is_accepted_and_one_of_the_same_weights_in_another_order_is_not,  # noqa: F401
    test_a_right_head_of_nemotron_h_is_accepted,  # noqa: F401
    test_hidden_states_of_a_queue_whose_slots_move,  # noqa: F401
    test_logits_of_the_head,  # noqa: F401
    test_logits_of_the_head_of_nemotron_h,  # noqa: F401
    test_options_that_round,  # noqa: F401
)


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch):
    monkeypatch.setitem(OPTIONS, "engine", "torch")
