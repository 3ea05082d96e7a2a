"""The record of an episode's tokens, which transcripts, rows, rollouts and replayed successes share."""

from r3lite.core.token_record import TokenRecord


def test_the_first_tokens_have_the_numbers_of_their_actions():
    record = TokenRecord(
        tokens=[5, 6, 7, 8, 9],
        action_mask=[False, True, True, False, True],
        logprobs=[-0.1, -0.2, -0.3],
        values=[0.1, 0.2, 0.3],
    )
    first = record.first(4)
    assert (first.tokens, first.action_mask) == ([5, 6, 7, 8], [False, True, True, False])
    assert (first.logprobs, first.values) == ([-0.1, -0.2], [0.1, 0.2])
    assert record.first(5) == record and record.first(0) == TokenRecord()


def test_a_row_that_nothing_was_sampled_of_has_no_numbers():
    row = TokenRecord(tokens=[5, 6], action_mask=[False, True])
    assert row.first(2) == row and row.first(1).logprobs == []
