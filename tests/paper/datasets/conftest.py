"""Data in the compact layout, made up here."""

import csv
import gzip
import json

import numpy as np
import pytest


def write_lines(path, rows):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def compact(tmp_path):
    """The compact layout with a few made-up rows."""
    rng = np.random.default_rng(0)
    fasseg, hierarchy, text = (tmp_path / name for name in ("fasseg", "hierarchy", "text"))
    for folder in (fasseg, hierarchy, text, text / "mlm"):
        folder.mkdir()
    shapes = {"frontal": (3, 12, 9), "multipose": (4, 12, 12)}
    rows = []
    for name, (n, height, width) in shapes.items():
        label = rng.integers(0, 6, (n, height, width)).astype(np.uint8)
        image = rng.integers(0, 256, (n, height, width, 3)).astype(np.uint8)
        hw = np.stack([np.full(n, height), np.arange(n) + width - n + 1], 1).astype(np.int16)
        for k in range(n):
            label[k, :, hw[k, 1] :] = 255
            image[k, :, hw[k, 1] :] = 0
            subject = "" if name == "frontal" else str(1 + k // 2)
            pose = "frontal" if k % 2 else "half"
            rows.append([name, k, 1, int(name == "frontal" or k == 0), pose, subject, subject, k % 3, 0.5 * k])
        np.savez(fasseg / f"{name}.npz", image=image, label=label, hw=hw)
    rows.insert(4, ["multipose", "", 0, 0, "half", "9", "1", "", ""])  # left out: empty cells
    with (fasseg / "metadata.csv").open("w", newline="") as file:
        names = ["set", "index", "included", "set118", "pose_bucket", "subject", "series", "ita_tercile_set", "ita"]
        csv.writer(file).writerows([names, *rows])

    tree = {"parent": [3, 3, 4, 5, 5, -1], "names": ["x", "y", "z", "a", "b", "Root"], "n_leaves": 3, "root": 5}
    (hierarchy / "wos_tree.json").write_text(json.dumps(tree))
    write_lines(
        hierarchy / "wos.jsonl.gz",
        [{"id": 10 + k, "text": f"text {k}", "label": k % 3, "parent": 3, "random_sample": k % 2} for k in range(6)],
    )
    probs = rng.dirichlet(np.ones(3), 4).astype(np.float16)
    keys = {"probs": probs, "label": np.array([2, 1, 0, 2]), "doc_id": np.array([15, 11, 13, 12])}
    np.savez(hierarchy / "scores.npz", **keys, random_sample=np.array([1, 0, 1, 1], dtype=np.uint8))

    write_lines(
        text / "prompts.jsonl.gz",
        [
            {"id": "a", "text": "She is a [MASK].", "word": "nurse", "group": "female", "corpus": "sst"},
            {"id": "b", "text": "He is a [MASK].", "word": "nurse", "group": "male", "corpus": "sst"},
            {"id": "c", "text": "He and she [MASK].", "word": None, "group": "both", "corpus": "pom"},
        ],
    )
    lists = {"attributes": {"jobs": ["nurse", "governer"]}, "attribute_token_ids": {"jobs": {"nurse": 7}}}
    (text / "word_lists.json").write_text(json.dumps(lists))
    np.savez(text / "h_prompts.npz", list_probs=np.ones((3, 1)))
    (text / "mlm" / "config.json").write_text("{}")
    return tmp_path
