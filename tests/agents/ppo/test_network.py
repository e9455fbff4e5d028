"""The LSTM over sequences, and the Fourier summary of slots."""

import pytest
import torch

from esper.agents.ppo.network import WAVES, SequenceLSTM, fourier, place_waves


def test_lstm_over_a_sequence_equals_steps_with_resets() -> None:
    torch.manual_seed(0)
    lstm = SequenceLSTM(6)
    x, starts = torch.randn(9, 3, 6), torch.rand(9, 3) < 0.3
    state = (torch.randn(3, 6), torch.randn(3, 6))
    whole, last = lstm(x, state, starts)
    for t in range(9):
        step, state = lstm(x[t : t + 1], state, starts[t : t + 1])
        torch.testing.assert_close(step[0], whole[t])
    torch.testing.assert_close(state[0], last[0])
    torch.testing.assert_close(state[1], last[1])


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
def test_the_trunks_summary_of_few_slots_loses_nothing(slots: int) -> None:
    assert torch.linalg.matrix_rank(fourier(place_waves(slots))) == min(slots, WAVES)


def test_a_summary_is_made_of_fourier_coefficients() -> None:
    """For 5 + 3 · (first cosine) at any number of slots above two: mean 5, first coefficient 3, no others."""
    for slots in (3, 4, 9):
        waves = place_waves(slots)
        values = 5 + 3 * waves[:, 1]
        expected = torch.tensor([5.0, 3.0, 0.0, 0.0])
        torch.testing.assert_close(fourier(waves) @ values, expected, atol=1e-5, rtol=0)
