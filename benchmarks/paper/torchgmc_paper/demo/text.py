"""De-biased prediction of words, end to end, in about a minute on two cores.

A small masked language model of BERT's architecture learns from sentences in which "she" is a nurse more often than "he" is.
Then the probability of each list of jobs is made independent of the group (:class:`torchgmc.DistributionHead`, in both its
geometries), audited on fresh prompts, and weighed against the likelihood of randomly masked words.

    $ torchgmc demo text
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.engine.extras import require
from torchgmc.report import Section, Table
from torchgmc.text import Quality, words
from torchgmc_paper.demo.progress import Bar, train
from torchgmc_paper.demo.sentences import JOBS, PEOPLE, Corpus, draw, vocabulary
from torchgmc_paper.demo.stage import Found, Page, Result, by_method, meaning, show, three

METHODS = ("unprocessed", "euclidean", "kl")


@dataclass(frozen=True)
class Setting:
    """Sizes of the demo; the defaults are what ``torchgmc demo text`` shows."""

    alpha: float | None = None  # 0.002; a tenth of the worst bias for the user's own model
    delta: float = 0.05
    num_train: int = 12_000
    num_calibration: int = 3000
    num_test: int = 3000
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 3e-3
    hidden_size: int = 64
    layers: int = 1
    alphas: int = 5  # points of the trade-off


QUICK = Setting(num_train=400, num_calibration=200, num_test=200, epochs=1, hidden_size=16, layers=1, alphas=2)
"""Everything once, in seconds; the model learns almost nothing."""


@dataclass(frozen=True)
class Data:
    """Logits at masked jobs (or similar words), and at randomly masked words with the words themselves."""

    calibration: Tensor
    calibration_groups: Tensor
    test: Tensor
    test_groups: Tensor
    masked: Tensor
    masked_groups: Tensor
    labels: Tensor
    attributes: dict[str, list[int]]
    groups: list[str]
    names: Any  # of the tokens: a list, or the tokenizer


@dataclass(frozen=True, kw_only=True)
class TextResult(Result):
    """What the demo found, on the test prompts; the report is of the head fitted with ``kl``.

    Attributes:
        model: the folder's name, or how the model was made.
        alpha: largest bias allowed.
        quality: by method, on randomly masked words: NLL, perplexity, KL, tokens at 0.
        tradeoff: by geometry, (worst bias on test prompts, NLL) for alpha from large to small.
    """

    demo: ClassVar[str] = "text"
    standard: ClassVar[Setting] = Setting()
    quick: ClassVar[Setting] = QUICK
    needs: ClassVar[dict[str, str]] = {"transformers": "text"}
    ours: ClassVar[str] = "kl"
    model: str
    alpha: float
    quality: dict[str, dict[str, float]]
    tradeoff: dict[str, list[tuple[float, float]]]

    def rows(self) -> list[dict[str, Any]]:
        """One row per group and list: probability of the list in the group, and bias, by method."""
        found = {name: {(r["group"], r["what"]): r for r in audit.rows()} for name, audit in self.audits.items()}
        columns = {"probability": "risk", "bias": "estimate", "verdict": "verdict"}
        return [
            {"group": group, "list": what, "mass": found["kl"][group, what]["mass"]}
            | {key: {name: found[name][group, what][column] for name in METHODS} for key, column in columns.items()}
            for group, what in sorted(found["kl"])
        ]

    def findings(self) -> dict[str, Any]:
        """Biases, quality, the trade-off, and how close the change is to the smallest."""
        return {
            "model": self.model,
            "alpha": self.alpha,
            "bias": self.rows(),
            "quality": self.quality,
            "tradeoff": self.tradeoff,
            "details": self.report.details,
        }

    def __rich__(self) -> Any:
        def numbers(row: dict[str, Any], name: str) -> str:
            return f"{1000 * row['bias'][name]:+.2f}"

        rows = [([row["group"], row["list"]], by_method(row, self.alpha, numbers, of="bias")) for row in self.rows()]
        lines = (("NLL of masked words", "NLL after", ".4f"), ("mean KL", "KL", ".2g"), ("tokens at 0", "zeros", ".1f"))
        return show(
            f"Bias P(A)(P(U|A) - P(U)) in units of 0.001, promised {1000 * self.alpha:.3g}",
            ["group", "list"],
            METHODS,
            rows,
            [[label, *(f"{self.quality[name][key]:{form}}" for name in METHODS)] for label, key, form in lines],
            meaning("the test prompts", self.setting.delta),
            self.certificate,
        )

    @staticmethod
    def work(setting: Setting, seed: int, bar: Bar, model: str | Path | None = None) -> Found:
        """See :meth:`torchgmc_paper.demo.stage.Result.work`.

        ``model``: folder of a masked language model of transformers with its tokenizer; its prompts are the paper's 22
        templates with the paper's words. Without it a small model is trained.
        """
        folder = None if model is None else Path(model)
        with bar.clock("model"):
            data = _from_scratch(setting, seed, bar) if folder is None else _from_folder(folder, seed, bar)
        with bar.clock("calibrate and audit"):
            plain = _audit(_head(data, 1.0, "kl"), data, setting.delta)
            alpha = setting.alpha or (0.002 if folder is None else plain.max_violation / 10)
            heads = {name: _head(data, alpha, name) for name in METHODS}
            audits = {name: _audit(head, data, setting.delta) for name, head in bar.track(heads.items(), "audit")}
            quality = {name: _quality(head, data) for name, head in heads.items()}
        with bar.clock("trade-off"):
            tradeoff = _tradeoff(data, plain.max_violation, setting, bar)
        name = "trained on the spot" if folder is None else folder.name
        fields = {"model": name, "alpha": alpha, "quality": quality, "tradeoff": tradeoff}
        return Found(heads["kl"], audits, fields, lambda result: _page(result, heads["kl"], data))


run = TextResult.run


# -- the model ---------------------------------------------------------------------------------------------------------------


def _from_scratch(setting: Setting, seed: int, bar: Bar) -> Data:
    known = vocabulary()
    place = {word: i for i, word in enumerate(known)}
    archive, calibration, test = three(setting, seed, bar, lambda num, own, _: draw(num, own))
    model = _train(archive, place, setting, seed, bar)
    prompts = [_logits(model, corpus, place, corpus.job, bar) for corpus in (calibration, test)]
    g = torch.Generator().manual_seed(seed)
    random = [int(torch.randint(len(s), (), generator=g)) for s in test.sentences]
    masked = _logits(model, test, place, random, bar)
    labels = torch.tensor([place[s[k]] for s, k in zip(test.sentences, random, strict=True)])
    groups = ["female", "male"]
    attributes = {name: [place[word] for word in entries] for name, entries in JOBS.items() if name != "other jobs"}
    member = [_groups(corpus, groups) for corpus in (calibration, test)]
    # A masked-out "she" no longer says who is meant.
    hidden = _groups(Corpus([[*s[:k], *s[k + 1 :]] for s, k in zip(test.sentences, random, strict=True)], random), groups)
    return Data(prompts[0], member[0], prompts[1], member[1], masked, hidden, labels, attributes, groups, known)


def _groups(corpus: Corpus, groups: Sequence[str]) -> Tensor:
    sets = [set(PEOPLE[name]) for name in groups]
    return torch.tensor([[bool(s.intersection(sentence)) for s in sets] for sentence in corpus.sentences])


def _rows(corpus: Corpus, place: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Token ids with [CLS] and [SEP], padded, and the attention mask: (n, t) each."""
    width = max(map(len, corpus.sentences)) + 2
    ids = [[2, *(place[w] for w in s), 3, *[0] * (width - 2 - len(s))] for s in corpus.sentences]
    table = torch.tensor(ids)
    return table, (table != 0).long()


def _train(data: Corpus, place: dict[str, int], setting: Setting, seed: int, bar: Bar) -> nn.Module:
    """One or two masked words in each sentence, AdamW, a learning rate that warms up and cools down."""
    transformers = require("transformers", extra="text")
    config = transformers.BertConfig(
        vocab_size=len(place),
        hidden_size=setting.hidden_size,
        num_hidden_layers=setting.layers,
        num_attention_heads=4,
        intermediate_size=2 * setting.hidden_size,
        max_position_embeddings=24,
        initializer_range=0.1,  # a narrow model learns to look at other words sooner
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.BertForMaskedLM(config)
    ids, attention = _rows(data, place)
    job = torch.tensor(data.job) + 1
    g = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(ids), generator=g) for _ in range(setting.epochs)])

    def loss(batch: Tensor) -> Tensor | None:
        inside = (ids[batch] > 4) & (torch.rand(len(batch), ids.shape[1], generator=g) < 0.15)
        chosen = inside | (torch.arange(ids.shape[1]) == job[batch, None]) & (torch.rand(len(batch), 1, generator=g) < 0.7)
        masked = ids[batch].masked_fill(chosen, 4)
        logits = model(input_ids=masked, attention_mask=attention[batch]).logits
        return F.cross_entropy(logits[chosen], ids[batch][chosen]) if bool(chosen.any()) else None

    return train(model, torch.split(order, setting.batch_size), loss, setting.learning_rate, bar, "train the model", cycle=True)


@torch.inference_mode()
def _logits(model: nn.Module, corpus: Corpus, place: dict[str, int], where: list[int], bar: Bar) -> Tensor:
    """Logits at one masked word of each sentence, (n, vocabulary)."""
    ids, attention = _rows(corpus, place)
    at = torch.tensor(where) + 1
    rows = torch.arange(len(ids))
    ids = ids.index_put((rows, at), torch.tensor(4))
    parts = [
        model(input_ids=ids[part], attention_mask=attention[part]).logits[torch.arange(len(part)), at[part]]
        for part in bar.track(torch.split(rows, 500), "read")
    ]
    return torch.cat(parts).clone()


def _from_folder(folder: Path, seed: int, bar: Bar) -> Data:
    """The user's own model on the paper's templates: half to calibrate, half to test."""
    if not folder.is_dir():
        raise FileNotFoundError(f"`model` must be the folder of a masked language model; {str(folder)!r} is not one.")
    transformers = require("transformers", extra="text")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).float().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # words of several pieces are left out; the report lists what counts
        attributes = gmc.text.attributes_from_words(tokenizer, words.ATTRIBUTES)
        groups = gmc.TokenGroups(tokenizer, words.INDICATORS)
    prompts = words.template_prompts(tokenizer.mask_token)
    g = torch.Generator().manual_seed(seed)
    ids = torch.tensor([*attributes["female_occupation"], *attributes["male_occupation"]])
    filled, labels = [], []
    for prompt in prompts:  # a job in the gap, and another word masked
        job = tokenizer.decode(ids[torch.randint(len(ids), (1,), generator=g)]).strip()
        tokens = tokenizer.encode(prompt.replace(tokenizer.mask_token, job))
        choice = [i for i, t in enumerate(tokens) if t not in tokenizer.all_special_ids]
        k = choice[int(torch.randint(len(choice), (), generator=g))]
        labels.append(tokens[k])
        filled.append([*tokens[:k], tokenizer.mask_token_id, *tokens[k + 1 :]])
    logits, member = _read(model, tokenizer, [tokenizer.encode(p) for p in prompts], groups, bar)
    masked, hidden = _read(model, tokenizer, filled, groups, bar)
    order = torch.randperm(len(prompts), generator=g)
    one, two = order[: len(order) // 2], order[len(order) // 2 :]
    known, fresh = (logits[one], member[one]), (logits[two], member[two])
    return Data(*known, *fresh, masked, hidden, torch.tensor(labels), attributes, groups.names, tokenizer)


@torch.inference_mode()
def _read(model: nn.Module, tokenizer: Any, rows: list[list[int]], groups: gmc.TokenGroups, bar: Bar) -> tuple[Tensor, Tensor]:
    """Logits at the mask and membership of each row of tokens."""
    logits, member = [], []
    for row in bar.track(rows, "read"):
        ids = torch.tensor([row])
        logits.append(model(input_ids=ids).logits[ids == tokenizer.mask_token_id])
        member.append(groups(ids))
    return torch.cat(logits).clone(), torch.cat(member).clone()


# -- what was found ------------------------------------------------------------------------------------------------------------


def _head(data: Data, alpha: float, name: str) -> gmc.DistributionHead:
    head = gmc.DistributionHead(data.attributes, alpha, data.groups, geometry="euclidean" if name == "euclidean" else "kl")
    head.fit(data.calibration, data.calibration_groups, solver="paper" if name == "euclidean" else "exact")
    if name == "unprocessed":
        head.offsets.zero_()  # the model as it is, under the same audit
    return head


def _audit(head: gmc.DistributionHead, data: Data, delta: float) -> gmc.Audit:
    return head.audit(data.test, data.test_groups, delta=delta)


def _quality(head: gmc.DistributionHead, data: Data) -> dict[str, float]:
    quality = Quality()
    for rows in torch.split(torch.arange(len(data.masked)), 500):
        quality.update(head, data.masked[rows], data.masked_groups[rows], data.labels[rows])
    return quality.compute()


def _tradeoff(data: Data, worst: float, setting: Setting, bar: Bar) -> dict[str, list[tuple[float, float]]]:
    """Worst bias on test prompts and NLL for alpha from the model's own bias down to a thirtieth of it."""
    alphas = [worst * 30 ** (-k / max(setting.alphas - 1, 1)) for k in range(setting.alphas)]
    found: dict[str, list[tuple[float, float]]] = {"euclidean": [], "kl": []}
    for name, alpha in bar.track([(n, a) for n in found for a in alphas], "trade-off"):
        head = _head(data, alpha, name)
        found[name].append((_audit(head, data, setting.delta).max_violation, _quality(head, data)["NLL after"]))
    return found


def _page(result: TextResult, head: gmc.DistributionHead, data: Data) -> Page:
    from torchgmc import plots

    start = (result.audits["unprocessed"].max_violation, result.quality["unprocessed"]["NLL before"])

    def moved(dark: bool, title: str | None = None) -> Any:
        return plots.words(head, data.test, data.test_groups, data.names, title=title, dark=dark)

    def curve(dark: bool, title: str | None = None) -> Any:
        labels = {"bias": "worst |bias|", "cost": "NLL of masked words (nats)"}
        return plots.tradeoff(result.tradeoff, start, title=title, dark=dark, **labels)

    drawn = {
        "bias.png": plots.deviation(result.audits, result.alpha, title="Bias of each list of words, by group"),
        "words.png": moved(False, "Words whose probability moved most"),
        "tradeoff.png": curve(False, "What the last bit of fairness costs"),
    }
    return {name: plots.png(figure) for name, figure in drawn.items()}, {
        "title": "The same chance of every job, whoever the sentence is about",
        "lead": f"A masked language model ({result.model}) predicts a masked word; its bias is removed in two geometries on "
        "calibration prompts and measured on fresh ones.",
        "sections": _sections(result),
        "figures": {
            "Words whose mean probability moved most, in each group": moved,
            "Worst bias against NLL of masked words, both geometries, from a large alpha to a small one": curve,
        },
    }


def _sections(result: TextResult) -> list[Section]:
    kinds = {"bias": ("bias", "+.4f"), "P(list | group)": ("probability", ".4f")}
    titles = [f"{kind}, {name}" for kind in kinds for name in METHODS]
    cells = [
        [row["group"], row["list"], *(f"{row[key][name]:{form}}" for key, form in kinds.values() for name in METHODS)]
        for row in result.rows()
    ]
    bias = Table(["group", "list", *titles], cells, titles)
    columns = {
        "NLL": "NLL after",
        "perplexity": "perplexity after",
        "KL": "KL",
        "tokens at 0": "zeros",
        "softmax(p)": "printed after",
    }
    worst = {name: f"{result.audits[name].max_violation:.5f}" for name in METHODS}
    cells = [[name, worst[name], *(f"{result.quality[name][key]:.5g}" for key in columns.values())] for name in METHODS]
    cost = Table(["method", "worst bias", *columns], cells, ["worst bias", *columns])
    details = result.report.details
    return [
        Section("Bias of each list, by group", ["Bias = P(group) (P(list | group) - P(list))."], [bias]),
        Section(
            "What it costs",
            [
                "Negative log-likelihood (nats) and perplexity of randomly masked words; mean KL from the model's own output; "
                "tokens per prompt whose probability became 0. The last column is the cross-entropy the paper prints, of "
                "softmax(p) instead of p."
            ],
            [cost],
        ),
        Section(
            "How close to the smallest change",
            [
                f"{result.report.message} Mean KL on the calibration prompts {details['kl']:.6f}; no distribution within alpha "
                f"has less than {details['kl_bound']:.6f}."
            ],
        ),
    ]
