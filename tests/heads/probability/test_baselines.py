"""One slope and offset for everyone, and for each group, against the optimality conditions of logistic regression."""

import pytest
import torch

import torchgmc as gmc


def draw(n=600, seed=0):
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(n, generator=rng).double()
    site = torch.randint(3, (n,), generator=rng)
    y = torch.rand(n, generator=rng) < torch.sigmoid(z + 0.8 * (site - 1))
    return torch.sigmoid(2.0 * z), y, torch.nn.functional.one_hot(site, 3).bool()


def scores_of(f, y, logit):
    """Both sums that logistic regression on [1, logit] brings to 0."""
    return torch.stack([(f - y.double()).mean(), ((f - y.double()) * logit).mean()])


def test_scaling_is_logistic_regression_on_the_logit():
    p, y, groups = draw()
    f = gmc.baselines.Scaling(groups=["a", "b", "c"]).fit(p, y, groups)(p, groups)
    assert float(scores_of(f, y, p.logit()).abs().max()) < 1e-5


def test_mondrian_scaling_is_one_for_each_group():
    p, y, groups = draw()
    head = gmc.baselines.MondrianScaling(groups=["a", "b", "c"]).fit(p, y, groups)
    f = head(p, groups)
    for one in groups.T:
        assert float(scores_of(f[one], y[one], p[one].logit()).abs().max()) < 1e-5
        alone = gmc.baselines.Scaling().fit(p[one], y[one])(p[one])
        torch.testing.assert_close(f[one], alone, atol=1e-4, rtol=0)


def test_groups_that_overlap_are_refused():
    p, y, groups = draw()
    groups[0] = True
    with pytest.raises(ValueError, match="`groups` overlap"):
        gmc.baselines.MondrianScaling(groups=["a", "b", "c"]).fit(p, y, groups)


def test_classes_have_vector_scaling():
    rng = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2000, 3, generator=rng).double()
    y = torch.multinomial((0.5 * logits + torch.tensor([0.0, 0.5, 0.0])).softmax(1), 1, generator=rng)[:, 0]
    head = gmc.baselines.Scaling(num_classes=3).fit(logits.softmax(1), y)
    truth = torch.nn.functional.one_hot(y, 3).double()
    before, after = (-(truth * f.log()).sum(1).mean() for f in (logits.softmax(1), head(logits.softmax(1)).double()))
    assert float(after) < float(before) - 0.05
    assert float((head(logits.softmax(1)) - truth).mean(0).abs().max()) < 1e-4
