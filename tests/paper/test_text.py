"""The text experiment on a made-up masked language model and made-up prompts, against plain NumPy."""

import csv
import gzip
import json
import os

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest.bert import bert_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from torchgmc.cli import main  # noqa: E402
from torchgmc.text import masked_logits, words  # noqa: E402
from torchgmc_paper import masked_lm, text  # noqa: E402
from torchgmc_paper.demo.progress import Bar  # noqa: E402
from torchgmc_paper.measures import measure, noise  # noqa: E402

FILL = ["film", "music", "river", "house", "cold", "green", "slow", "very", "never", "often", "saw", "took", "with"]
PEOPLE = {"female": ["she", "mother", "queen", "aunt"], "male": ["he", "father", "king", "uncle"], "both": ["she and he"]}


def write_lines(path, rows):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sixty prompts, forty templates and ninety masked words in the compact layout, with a model of random weights."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "text"
    folder.mkdir()
    known = {word.lower() for entries in words.ATTRIBUTES.values() for word in entries} - {"governer", "governers"}
    people = {word for entries in PEOPLE.values() for phrase in entries for word in phrase.split()}
    tokenizer = bert_tokenizer(sorted(known | people | {*FILL, "and", "."}))
    tokenizer.save_pretrained(folder / "mlm")
    place = tokenizer.get_vocab()
    config = transformers.BertConfig(
        vocab_size=len(place),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertForMaskedLM(config).save_pretrained(folder / "mlm")
    random = np.random.default_rng(0)
    files = {"prompts": [], "templates": [], "random_mask": []}
    for k in range(190):
        name = "prompts" if k < 60 else "templates" if k < 100 else "random_mask"
        group = ["female", "male", "both"][random.choice(3, p=[0.35, 0.55, 0.1])]
        before, after = (" ".join(random.choice(FILL, random.integers(1, 5))) for _ in range(2))
        sentence = f"{random.choice(PEOPLE[group])} {before} [MASK] {after} ."
        word = str(random.choice(sorted(known if name == "prompts" else FILL)))
        row = {"id": str(k), "text": sentence, "word": word, "group": group, "corpus": "made up"}
        row |= {"token_id": place[word]} if name == "random_mask" else {"lists": []}
        files[name].append(row | ({"word": None} if name == "templates" else {}))
    for prompt in files["prompts"][:30]:  # the same sentence with another word masked
        tokens = prompt["text"].replace("[MASK]", prompt["word"]).split()
        where = len(tokens) - 2
        again = {"text": " ".join([*tokens[:where], "[MASK]", *tokens[where + 1 :]]), "word": tokens[where]}
        files["random_mask"].append({**prompt, **again, "token_id": place[tokens[where]]})
        del files["random_mask"][-1]["lists"]
    for name, rows in files.items():
        write_lines(folder / f"{name}.jsonl.gz", rows)
    (folder / "word_lists.json").write_text(json.dumps({"attributes": words.ATTRIBUTES}))
    return root


SETTING = text.Setting(masked=40, max_steps=30)


@pytest.fixture(scope="module")
def prepared(data, tmp_path_factory):
    return text.prepare(data, tmp_path_factory.mktemp("out"), Bar(), SETTING)


@pytest.fixture(scope="module")
def rows(prepared):
    return text.run_seed(prepared, 3)


# -- plain NumPy ---------------------------------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def logits_of(prepared, model, source):
    t = {name: value.double().numpy() for name, value in prepared.tensors.items() if value.is_floating_point()}
    side = prepared.tensors[f"member {source}"].double().numpy() @ np.array([1.0, -1.0])
    z = t[source] + (side[:, None] * t["direction"] if model == "biased" else 0.0)
    return z @ t["weight"].T + t["bias"]


def masses(p, attributes):
    return np.stack([p[:, ids].sum(1) for ids in attributes.values()], 1)


def bias(q, member):
    return np.array([[(inside * (q[:, k] - q[:, k].mean())).mean() for k in range(q.shape[1])] for inside in member.T])


def split(prepared, source, seed):
    order = torch.randperm(len(prepared.tensors[f"member {source}"]), generator=torch.Generator().manual_seed(seed))
    return order[: len(order) // 2].numpy(), order[len(order) // 2 :].numpy()


# -- the models -----------------------------------------------------------------------------------------------------------


def test_what_is_kept_gives_the_models_own_logits(data, prepared):
    model, tokenizer = masked_lm.load_model(data / "text/mlm")
    source = gmc.datasets.GenderPrompts(data)
    found = logits_of(prepared, "given", "prompts")
    for batch in masked_logits(model, tokenizer, source.texts, progress=False):
        np.testing.assert_allclose(found[batch.sentence.numpy()], batch.logits.numpy(), atol=2e-4)


def test_two_masks_are_refused(data):
    model, tokenizer = masked_lm.load_model(data / "text/mlm")
    with pytest.raises(ValueError, match=r"texts\[1\] must have one \[MASK\]"):
        masked_lm.read(model, tokenizer, ["she saw [MASK] .", "[MASK] saw [MASK] ."], Bar())


def test_the_second_model_is_biased_as_said(prepared):
    attributes = prepared.extra["attributes"]
    weight, direction = prepared.tensors["weight"].double().numpy(), prepared.tensors["direction"].double().numpy()
    side = {i: sign for name, sign in masked_lm.STEREOTYPES.items() for i in attributes[name]}
    moved = [sign * weight[i] @ direction for i, sign in side.items()]
    assert np.mean(moved) == pytest.approx(SETTING.strength, rel=1e-4)
    member = prepared.tensors["member prompts"].double().numpy()
    alone = member.sum(1) == 1
    np.testing.assert_array_equal(logits_of(prepared, "biased", "prompts")[~alone], logits_of(prepared, "given", "prompts")[~alone])
    q = {m: masses(softmax(logits_of(prepared, m, "prompts")), attributes) for m in text.MODELS}
    change = bias(q["biased"], member) - bias(q["given"], member)
    along = change @ [masked_lm.STEREOTYPES[name] for name in attributes]
    assert along[0] > 0.02 and along[1] < -0.02


def test_stereotype_is_the_least_squares_direction():
    random = np.random.default_rng(1)
    e = random.normal(size=(60, 5))
    attributes = {name: [3 * k, 3 * k + 1] for k, name in enumerate(masked_lm.STEREOTYPES)}
    t = np.zeros(60)
    for name, ids in attributes.items():
        t[ids] = masked_lm.STEREOTYPES[name]
    root = np.sqrt(1 / 60 + 0.5 * (t != 0) / 12)
    best = np.linalg.lstsq(root[:, None] * e, root * t, rcond=None)[0]
    best /= (e[t != 0] @ best * t[t != 0]).mean()
    np.testing.assert_allclose(masked_lm.stereotype(torch.tensor(e), attributes).numpy(), best, rtol=1e-2, atol=1e-3)


def test_alpha_follows_the_papers_rule(prepared):
    for model in text.MODELS:
        for source in text.SETS:
            member = prepared.tensors[f"member {source}"].double().numpy()
            worst = np.abs(bias(masses(softmax(logits_of(prepared, model, source)), prepared.extra["attributes"]), member)).max()
            half = float(f"{0.5 * worst:.2g}")
            assert prepared.extra["alpha"][text.part_of(model, source)] == pytest.approx(min(0.002, half), rel=0.06)


# -- a seed ----------------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_a_loop(prepared, rows):
    """Unprocessed, and kl with its offsets applied by hand, measured on the other half."""
    attributes, groups = prepared.extra["attributes"], prepared.extra["groups"]
    part = text.part_of("biased", "prompts")
    calibration, test = split(prepared, "prompts", 3)
    logits = logits_of(prepared, "biased", "prompts")
    member = prepared.tensors["member prompts"].numpy()
    head = gmc.DistributionHead(attributes, prepared.extra["alpha"][part], groups, noise_floor=False)
    head.fit(torch.tensor(logits[calibration]), torch.tensor(member[calibration]))
    lists = np.zeros((len(attributes), logits.shape[1]))
    for k, ids in enumerate(attributes.values()):
        lists[k, ids] = 1.0
    shift = (member[test] - member[calibration].mean(0)) @ head.offsets.numpy() @ lists
    h, p = softmax(logits[test]), softmax(logits[test] - shift)
    for method, probs in (("unprocessed", h), ("kl", p)):
        found = bias(masses(probs, attributes), member[test])
        for measured, scale in (("mass", 1.0), ("conditional", member[test].mean(0)[:, None])):
            mine = [r for r in rows if (r["part"], r["method"], r["measure"]) == (part, method, measured)]
            assert [r["group"] for r in mine] == [f"{g}: {name}" for g in groups for name in attributes]
            np.testing.assert_allclose([r["deviation"] for r in mine], (found / scale).ravel(), atol=1e-6)
            kl = (probs * np.log(probs / h)).sum(1).mean()
            assert mine[0]["cost"]["KL on test"] == pytest.approx(kl, rel=1e-3, abs=1e-9)
    on_calibration = [r["calibration"] for r in rows if r["part"] == part and r["method"] == "kl" and r["measure"] == "mass"]
    assert max(map(abs, on_calibration)) <= prepared.extra["alpha"][part] * (1 + 1e-9)
    assert {r["method"] for r in rows} == set(text.METHODS) and len(rows) == 4 * 5 * 2 * 12
    assert {r["alpha"] for r in rows if r["part"] == part} == {prepared.extra["alpha"][part]}


def test_the_cost_is_measured_where_nothing_was_calibrated(prepared):
    calibration, _ = split(prepared, "prompts", 3)
    chosen = text._masked(prepared, torch.tensor(calibration), torch.Generator().manual_seed(0))
    used = set(prepared.tensors["sentence prompts"][calibration].tolist())
    every = prepared.tensors["sentence random_mask"].tolist()
    assert len(chosen) == 40 == len(set(chosen.tolist()))
    assert used & set(every) and not used & {every[k] for k in chosen.tolist()}


def test_the_oracle_is_fitted_on_all_prompts(prepared, rows):
    part = text.part_of("biased", "prompts")
    options = (prepared.extra["attributes"], prepared.extra["alpha"][part], prepared.extra["groups"])
    head = gmc.DistributionHead(*options, noise_floor=False)
    head.fit(torch.tensor(logits_of(prepared, "biased", "prompts")), prepared.tensors["member prompts"])
    found = [r["calibration"] for r in rows if (r["part"], r["method"], r["measure"]) == (part, "oracle", "mass")]
    np.testing.assert_allclose(found, head.report.violations_after.flatten().numpy(), atol=1e-6)


def test_quantities_against_numpy():
    random = np.random.default_rng(0)
    before = np.log(softmax(random.normal(size=(9, 40)) * 3))
    p = softmax(before + random.normal(size=(9, 40)))
    p[:, 5:9] = 0.0  # as a projection leaves them
    p /= p.sum(1, keepdims=True)
    labels = np.array([0, 1, 2, 3, 5, 10, 11, 12, 13])
    with np.errstate(divide="ignore", invalid="ignore"):
        after = np.log(p)
        kl = np.where(p > 0, p * (after - before), 0.0).sum(1)
    found = text.quantities(
        torch.tensor(before), torch.tensor(after), [torch.tensor([0, 1]), torch.tensor([5, 7])], torch.tensor(labels)
    )
    np.testing.assert_allclose(found["KL"], kl, rtol=1e-9)
    np.testing.assert_allclose(found["q"], np.stack([p[:, :2].sum(1), np.zeros(9)], 1))
    np.testing.assert_allclose(found["after"], -after[range(9), labels])
    np.testing.assert_array_equal(found["zeros"], [4] * 9)
    np.testing.assert_array_equal(found["top1"], p.argmax(1) == labels)
    np.testing.assert_allclose(found["printed"], -np.log(softmax(p))[range(9), labels])
    cost = text._cost(found)
    there = np.isfinite(after[range(9), labels])
    assert cost["labels at 0"] == pytest.approx(1 / 9) and there.sum() == 8
    assert cost["NLL"] == pytest.approx(-after[range(9), labels][there].mean())
    assert cost["NLL increase"] == pytest.approx((before - after)[range(9), labels][there].mean())


def test_a_small_kl_survives_float32():
    random = np.random.default_rng(0)
    before = np.log(softmax(random.normal(size=(50, 3000)) * 3))
    after = np.log(softmax(before + 1e-3 * random.normal(size=before.shape)))
    true = (np.exp(after) * (after - before)).sum(1)
    found = text.quantities(torch.tensor(before).float(), torch.tensor(after).float(), [torch.tensor([0])])["KL"]
    np.testing.assert_allclose(found, true, rtol=0.01)


# -- noise -----------------------------------------------------------------------------------------------------------------


def draw(random, n, beta=0.0):
    """Overlapping groups; q is skewed and its spread depends on the group. Without beta its mean does not."""
    female = random.random(n) < 0.4
    male = ~female | (random.random(n) < 0.3)
    q = np.stack([random.gamma(0.5, 0.02, n), random.gamma(2.0, 0.01, n)], 1)
    q[:, 0] = 0.01 + np.where(female, 1.0, 2.5) * (q[:, 0] - 0.01) + beta * female
    return torch.tensor(q), torch.tensor(np.stack([female, male], 1))


def test_noise_is_what_an_oracle_shows_on_many_test_sets():
    random = np.random.default_rng(0)
    n, m = 400, 300
    tests = [text.bias_of(*draw(random, n)).numpy() for _ in range(4000)]
    fits = [text.bias_of(*draw(random, m)).numpy() for _ in range(4000)]
    oracle = np.abs(tests).mean(0).ravel()
    fitted = np.abs(np.array(tests) - np.array(fits)).mean(0).ravel()
    worst = np.abs(tests).max((1, 2)).mean()
    q, member = draw(random, 100_000)
    found = noise(text.contributions(q, member).flatten(1))[0].numpy() * (100_000 / n) ** 0.5
    np.testing.assert_allclose(found, oracle, rtol=0.05)
    # From test sets of that size, as the rows have it.
    drawn = [
        [r for r in text.deviations("", *draw(random, n), ["f", "m"], ["u", "v"], torch.zeros(2, 2), torch.ones(2), m)]
        for _ in range(60)
    ]
    mass = np.array([[[r["noise"], r["noise_fitted"], r["worst_noise"]] for r in one if r["measure"] == "mass"] for one in drawn])
    np.testing.assert_allclose(mass.mean(0)[:, 0], oracle, rtol=0.06)
    np.testing.assert_allclose(mass.mean(0)[:, 1], fitted, rtol=0.06)
    assert mass[:, 0, 2].mean() == pytest.approx(worst, rel=0.06)


def test_a_bias_is_no_noise_and_a_fixed_target_would_overstate_it():
    random = np.random.default_rng(1)
    state = random.bit_generator.state
    plain = noise(text.contributions(*draw(random, 20_000)).flatten(1))[0]
    random.bit_generator.state = state
    q, member = draw(random, 20_000, beta=0.5)
    shifted = noise(text.contributions(q, member).flatten(1))[0]
    np.testing.assert_allclose(shifted[:2], plain[:2], rtol=1e-9)  # the shifted group: its own mean is taken off
    fixed = measure("", ["m"], member[:, 1:], q[:, 1] - q[:, 1].mean(), num_calibration=10)[0]["noise"]
    assert fixed > 1.5 * float(shifted[3])


def test_deviations_hold_the_conditional_noise_too():
    q, member = draw(np.random.default_rng(2), 500)
    known = torch.tensor([[0.1, -0.2], [0.3, 0.4]])
    found = text.deviations("x", q, member, ["f", "m"], ["u", "v"], known, torch.tensor([0.5, 0.8]), 500)
    mass, inside = found[:4], found[4:]
    share = member.double().mean(0).repeat_interleave(2).numpy()
    for key in ("deviation", "noise", "noise_fitted"):
        np.testing.assert_allclose([r[key] for r in inside], np.array([r[key] for r in mass]) / share)
    np.testing.assert_allclose([r["calibration"] for r in inside], [0.2, -0.4, 0.375, 0.5], rtol=1e-6)
    np.testing.assert_allclose([r["risk"] for r in mass], [q[member[:, a], k].mean() for a in (0, 1) for k in (0, 1)])


# -- the command -------------------------------------------------------------------------------------------------------------


def test_command_writes_page_tables_and_figures(data, tmp_path, capsys):
    assert (
        main(
            [
                "reproduce",
                "text",
                "--data",
                str(data),
                "--out",
                str(tmp_path),
                "--quick",
                "--set",
                "limit=40",
                "--set",
                "alpha=0.5",
            ]
        )
        == 0
    )
    page = (tmp_path / "text.md").read_text()
    assert "torchgmc reproduce text --data DIR --seeds 2 --quick" in page and "transformers" in page
    assert str(tmp_path) not in page and "/tmp" not in page and os.uname().nodename not in page
    assert "made biased on purpose" in page and "paper: GMC" in page
    with (tmp_path / "text.csv").open() as file:
        table = list(csv.DictReader(file))
    parts = {text.part_of(model, source) for model in text.MODELS for source in text.SETS}
    assert {row["part"] for row in table} == parts and {row["method"] for row in table} == set(text.METHODS)
    assert len({row["alpha"] for row in table}) > 1
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == sorted(
        f"text-{m_s}.png"
        for m_s in ("prompts--given-model", "templates--given-model", "prompts--biased-model", "templates--biased-model")
    )
    assert all(f"({name})" in page for name in pictures)
    with (tmp_path / "text_costs.csv").open() as file:
        costs = {(row["part"], row["method"], row["cost"]): float(row["mean"]) for row in csv.DictReader(file)}
    assert costs["prompts, given model", "unprocessed", "KL"] == 0.0
    assert costs["prompts, given model", "kl", "tokens at 0"] == 0.0
    assert ("templates, given model", "kl", "NLL") not in costs  # measured once, with the prompts


def test_seeds_are_the_same_again(prepared, rows):
    assert text.run_seed(prepared, 3) == rows
    assert text.run_seed(prepared, 4) != rows
