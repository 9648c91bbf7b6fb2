"""From logits to tokens."""

import pytest
import torch

from halting_bench.engine.sampling import Sampling
from halting_bench.errors import UserError

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64))


def draws(sampling: Sampling, count: int = 4000) -> torch.Tensor:
    """Frequencies of the four tokens."""
    uniforms = sampling.uniforms(uid=7, count=count)
    tokens = sampling.draw(LOGITS.expand(count, -1), uniforms)
    return torch.bincount(tokens, minlength=4) / count


def test_the_default_is_the_argmax() -> None:
    assert Sampling().draw(LOGITS, None).tolist() == [1]


def test_tokens_come_with_their_probabilities() -> None:
    torch.testing.assert_close(draws(Sampling(1.0)), torch.tensor([0.1, 0.4, 0.2, 0.3]), atol=0.03, rtol=0)


def test_a_lower_temperature_sharpens() -> None:
    powered = torch.tensor([0.1, 0.4, 0.2, 0.3]) ** 2
    torch.testing.assert_close(draws(Sampling(0.5)), powered / powered.sum(), atol=0.03, rtol=0)


def test_top_k_keeps_the_k_likeliest() -> None:
    torch.testing.assert_close(draws(Sampling(1.0, top_k=2)), torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]), atol=0.03, rtol=0)


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    assert (draws(Sampling(1.0, top_p=0.6)) > 0).tolist() == [False, True, False, True]
    assert (draws(Sampling(1.0, top_p=0.8)) > 0).tolist() == [False, True, True, True]
    assert draws(Sampling(1.0, top_p=1e-9)).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_draws_depend_on_seed_and_uid_only() -> None:
    assert torch.equal(Sampling(1.0, seed=1).uniforms(2, 5), Sampling(0.5, seed=1).uniforms(2, 9)[:5])
    assert not torch.equal(Sampling(1.0, seed=1).uniforms(2, 5), Sampling(1.0, seed=1).uniforms(3, 5))
    assert not torch.equal(Sampling(1.0, seed=1).uniforms(2, 5), Sampling(1.0, seed=2).uniforms(2, 5))


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_a_setting_out_of_range_is_the_users_to_mend(wrong: dict[str, float]) -> None:
    [name] = wrong
    with pytest.raises(UserError, match=name):
        Sampling(**wrong)  # type: ignore[arg-type]
