"""notebooks/paper.md: every name and test it mentions exists, and the slips it lists are shown here in numbers."""

import importlib
import math
import re

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest import ROOT
from torchgmc.mappings import Centered, Pinball
from torchgmc.theory import distribution_constants, iteration_bound, sample_size, split_size, step_size

PAGE = (ROOT / "notebooks/paper.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`((?:gmc|torchgmc|torchgmc_paper)\b[\w.]*)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)", PAGE)))


def find(name):
    """The object of a dotted name: modules are imported, fields of a dataclass count."""
    parts = name.replace("gmc.", "torchgmc.", 1).split(".") if name.startswith("gmc.") else name.split(".")
    thing, place = importlib.import_module(parts[0]), parts[0]
    for part in parts[1:]:
        if part in getattr(thing, "__dataclass_fields__", {}):
            return thing.__dataclass_fields__[part]
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = importlib.import_module(f"{place}.{part}")
        place += f".{part}"
    return thing


def test_every_code_name_exists():
    assert len(NAMES) > 50
    for name in NAMES:
        assert find(name) is not None, name
    with pytest.raises(ImportError):
        find("gmc.theory.no_such_thing")


def test_every_test_exists():
    assert len(TESTS) > 15
    for file, name in TESTS:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", PAGE) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / "notebooks" / link).exists(), link


# -- the slips ----------------------------------------------------------------------------------------------------------


def tree_run(sign, steps=600, eta=0.01, alpha=0.01, sigma=0.9, n=4000):
    """Algorithm 1 on a tree of 2 x 3 leaves, plain numpy, with s = sign * (covered - sigma); worst violation per step."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, n)
    logits = rng.normal(size=(n, 6)) + 2.2 * np.eye(6)[labels]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    best = p.argmax(1)
    levels = np.stack([np.ones(n), p.reshape(n, 2, 3).sum(2)[np.arange(n), best // 3], p.max(1)], 1)  # root, parent, leaf
    levels = levels + rng.uniform(-0.05, 0.05, (n, 1))
    lam, history = np.full(n, 0.7), []
    for _ in range(steps):
        depth = np.where((levels < lam[:, None]).any(1), (levels < lam[:, None]).argmax(1), 2)
        covered = (depth == 0) | ((depth == 1) & (best // 3 == labels // 3)) | (best == labels)
        sets = np.stack([(depth > 0) & (best // 3 == 0), (depth > 0) & (best // 3 == 1), np.ones(n, bool)], 1)
        violation = sign * sets.T @ (covered - sigma) / n
        worst = np.abs(violation).argmax()
        history.append(abs(violation[worst]))
        if history[-1] <= alpha:
            break
        lam = lam - eta * np.sign(violation[worst]) * sets[:, worst]
    return history


def test_the_printed_sign_of_the_tree_diverges():
    ours, printed = tree_run(1), tree_run(-1)
    assert ours[-1] <= 0.01 and len(ours) < 50
    assert len(printed) == 600 and min(printed) == printed[0] and printed[-1] > 1.5 * printed[0]


def test_the_printed_sign_of_quantiles_diverges():
    """Appendix E prints s = q - 1{score <= f}: the same promise, but steps against it lead away."""
    scores = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)).double()
    f0 = torch.full((1000, 1), 0.5).double()
    who = torch.ones(1000, 1).bool()
    options = {"alpha": 0.01, "solver": "paper", "eta": 0.01, "max_iter": 400}
    ours = gmc.solve(f0, Pinball(scores, 0.9), who, **options)
    printed = gmc.solve(f0, lambda f: 0.9 - (scores <= f).double(), who, **options)
    assert ours.report.converged and float(ours.f[0]) == pytest.approx(0.9, abs=0.02)
    assert not printed.report.converged and float(printed.report.violations_after.abs().max()) >= 0.4 - 0.02


def test_the_proof_of_theorem_4_has_coverage_one_minus_sigma():
    """Its potential sigma lambda - min(lambda, r) is smallest where a share sigma of the levels r is not yet below lambda."""
    levels, sigma = np.random.default_rng(0).random(4001), 0.9
    grid = np.linspace(0, 1, 1001)
    potential = sigma * grid - np.minimum(grid[:, None], levels).mean(1)
    assert (levels < grid[potential.argmin()]).mean() == pytest.approx(1 - sigma, abs=0.01)


def test_a_correct_leaf_always_covers():
    """The identity before Theorem 4 says that y = u is not covered when r_u >= lambda; the answer is then u itself."""
    head = gmc.TreeHead({"a": ["b", "c"], "d": ["e", "f"]}, target=0.9, alpha=0.1, jitter=0.0)
    probs, label = torch.tensor([[0.1, 0.7, 0.1, 0.1]]), 1
    node = head.answer(probs, torch.tensor([0.5]))
    assert not bool(probs[0, label] < 0.5)  # 1{r_q(y, u) < lambda} = 0
    assert bool(head.leaves(node)[0, label])


def test_text_needs_b_of_mass_times_list_length():
    """E||1_A v||^2 = P(A)|U|, 10 here; the step alpha of the proof's B = 1 overshoots for ever, alpha / 10 stops."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(400, 60, generator=generator).softmax(1).double()
    member = (torch.arange(400) % 2 == 0)[:, None]
    p[:200, :20] += 0.01
    member = torch.cat([member, ~member], 1)
    member[:, 0] = torch.arange(400) < 200
    member[:, 1] = ~member[:, 0]
    what = (torch.arange(60) < 20)[None].double()
    g = member[:, 0, None] * what
    bound = float(g.square().sum(1).mean())
    assert bound == distribution_constants(20, mass=0.5).bound == 10.0
    options = {"alpha": 0.02, "solver": "paper", "max_iter": 2000}
    right = gmc.solve(p, Centered(), member, what, eta=step_size(0.02, 1.0, bound), **options)
    printed = gmc.solve(p, Centered(), member, what, eta=step_size(0.02, 1.0, 1.0), **options)
    assert right.report.converged and not printed.report.converged


def test_segmentation_takes_one_over_alpha_squared():
    """Theorem 5 prints T ~ 1/alpha; K, B and the gap do not depend on alpha, so half the alpha is four times the bound."""
    constants = gmc.theory.threshold_constants(0.075, density=5.0, span=2.0)
    few, many = (iteration_bound(alpha, *constants) for alpha in (0.01, 0.005))
    assert many == 4 * few


def test_lower_bound_of_theorem_5_fails_for_large_targets():
    """L at lambda = h = M is -sigma M, below the printed -(1 - sigma) M as soon as sigma > 1/2."""
    sigma, m = 0.9, 1.0
    potential = (1 - sigma) * m - min(m, m)
    assert potential == pytest.approx(-sigma * m) and potential < -(1 - sigma) * m


def test_theorem_1s_step_is_guaranteed_nothing_in_algorithm_2():
    """Gain eta v - eta^2 K B / 2 at the violation alpha / 2 that Theorem 2's proof is left with."""
    alpha, smoothness, bound = 0.01, 2.0, 0.5
    for finite, gain in ((False, 0.0), (True, alpha**2 / (8 * smoothness * bound))):
        eta = step_size(alpha, smoothness, bound, finite_sample=finite)
        assert eta * alpha / 2 - eta**2 * smoothness * bound / 2 == pytest.approx(gain, abs=1e-18)


def test_dimension_is_the_logarithm():
    """m = C1 (d + log(1/delta)) / alpha^2 is the proof's own m for d = log(2|G|), and far from it for the printed 2|G|."""
    alpha, delta, functions = 0.1, 0.05, 100
    proof = 2 / alpha**2 * math.log(2 * functions / delta)
    sizes = [2 / alpha**2 * (d + math.log(1 / delta)) for d in (math.log(2 * functions), 2 * functions)]
    assert sizes[0] == pytest.approx(proof) and sizes[1] > 20 * proof
    assert split_size(4 * alpha, delta, functions) == math.ceil(proof)


def test_the_bound_on_s_g_needs_the_1_norm():
    """|s|_inf <= C2 and |g|_2 <= A do not give |<s, g>| <= A C2: here it is sqrt(l) times that."""
    s, g = np.ones(16), np.full(16, 0.25)
    assert np.abs(s).max() == 1 and np.linalg.norm(g) == 1
    assert s @ g == 4.0 == np.abs(g).sum()


def test_chernoffs_inequality_is_about_large_deviations():
    """Theorem 6 prints P(|X - mu| <= lambda) <= 2 exp(...); the mean of 100 coins is near mu nearly always."""
    x = np.random.default_rng(0).random((2000, 100)) < 0.5
    off = np.abs(x.sum(1) - 50)
    limit = 2 * math.exp(-2 * 20**2 / 100)
    assert (off <= 20).mean() > 0.99 > limit >= (off > 20).mean()


def test_samples_grow_with_the_steps():
    """The sample sizes printed with the applications have no factor T; Theorem 2, which they apply, has."""
    assert sample_size(0.1, 0.05, 4, iterations=10) > 10 * sample_size(0.1, 0.05, 4, iterations=1)


def test_missing_nothing_takes_a_low_threshold():
    """Section 3.3 says that a large lambda makes every miss rate 0; with masks h > lambda a low one does."""
    scores, masks = torch.rand(20, 8, 8), torch.ones(20, 8, 8).bool()
    missed = [float((masks & ~(scores > level)).double().mean()) for level in (-0.1, 1.1)]
    assert missed == [0.0, 1.0]


def test_printed_cross_entropy_is_that_of_softmaxed_probabilities():
    """A perfect model gets ln(V - 1 + e) - 1 = 9.33 for V = 30,522, a useless one ln V = 10.33: 9.93 lies between."""
    vocabulary = 30_522
    logits = torch.zeros(2, vocabulary)
    head = gmc.DistributionHead({"a": [1]}, 0.001, ["everyone"]).fit(torch.randn(4, vocabulary), torch.ones(4, 1).bool())
    values = []
    for confident in (1000.0, 0.0):
        quality = gmc.text.Quality()
        logits[:, 7] = confident
        quality.update(head, logits, torch.ones(2, 1).bool(), torch.tensor([7, 7]))
        values.append(quality.compute())
    assert values[0]["NLL before"] == pytest.approx(0.0, abs=1e-6)
    assert values[0]["printed before"] == pytest.approx(math.log(vocabulary - 1 + math.e) - 1, abs=1e-4)
    assert values[0]["printed before"] < 9.93 < values[1]["printed before"] == pytest.approx(math.log(vocabulary), abs=1e-3)
