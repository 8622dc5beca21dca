"""The router's square-root-softplus as training meets it: values and gradients at logits of any size."""

import torch

from rorqual.model.moe import affinity


def scored(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and the gradient of their sum."""
    leaf = logits.clone().requires_grad_()
    scores = affinity(leaf, "sqrtsoftplus")
    (grad,) = torch.autograd.grad(scores.sum(), leaf)
    return scores.detach(), grad


def test_scores_and_slopes_are_those_of_the_formula() -> None:
    logits = torch.linspace(-60, 60, 481)
    exact = logits.double()
    root = torch.log1p(exact.exp()).sqrt()
    scores, slopes = scored(logits)
    torch.testing.assert_close(scores.double(), root, atol=0, rtol=1e-5)
    torch.testing.assert_close(slopes.double(), exact.sigmoid() / (2 * root), atol=0, rtol=1e-5)


def test_logits_whose_softplus_underflows_have_a_finite_gradient() -> None:
    """softplus of -104 is 0 in fp32: a root has no slope there, and inf x 0 would be NaN in every weight below."""
    scores, slopes = scored(torch.tensor([-80.0, -90.0, -103.0, -104.0, -120.0, -1e4]))
    assert torch.isfinite(scores).all() and torch.isfinite(slopes).all()
    assert (scores >= 0).all() and (scores < 1e-17).all() and (slopes >= 0).all() and (slopes < 1e-17).all()
    assert scores.diff().le(0).all(), "a lower logit has no higher score"
