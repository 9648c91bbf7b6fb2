"""A row that is not finite reaches the rows that attend to it, and no other."""

import pytest
import torch

from halting_bench.architectures.attention import DenseContext

LENGTHS = torch.tensor([5, 3])


def heads() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 5, count, 4, generator=generator, dtype=torch.float64) for count in (4, 2, 2))


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_that_breaks_stays_with_those_that_see_it(causal: bool, place: int, what: float) -> None:
    broken = [part.clone() for part in heads()]
    broken[place][0, 2, 1, 3] = what
    context = DenseContext(5, causal=causal, lengths=LENGTHS, contain=True)
    out, clean = context.attend(0, *broken), context.attend(0, *heads())
    seen = torch.zeros(2, 5, dtype=torch.bool)
    seen[0, 2 if causal else 0 :] = True
    assert out[seen].isnan().all()
    torch.testing.assert_close(out[~seen], clean[~seen], rtol=0, atol=1e-12)


def test_padding_that_breaks_is_seen_by_nobody() -> None:
    broken = [part.clone() for part in heads()]
    broken[2][1, 4] = torch.nan
    context = DenseContext(5, causal=False, lengths=LENGTHS, contain=True)
    torch.testing.assert_close(context.attend(0, *broken), context.attend(0, *heads()), rtol=0, atol=1e-12)


def test_finite_rows_are_not_touched() -> None:
    plain = DenseContext(5).attend(0, *heads())
    torch.testing.assert_close(DenseContext(5, contain=True).attend(0, *heads()), plain, rtol=0, atol=0)
