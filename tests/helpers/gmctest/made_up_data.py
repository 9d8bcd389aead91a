"""Small made-up data in the compact layout of torchgmc.datasets."""

import csv
import gzip
import json

import numpy as np

LEAVES, PARENTS = 6, [6, 6, 7, 7, 8, 8, 9, 9, 9, -1]


def hierarchy(root, n=300, seed=0):
    """Web of Science in small: 6 leaves under 3 parents, scores that are right more often than not."""
    folder = root / "hierarchy"
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    labels = random.integers(LEAVES, size=n)
    logits = random.normal(size=(n, LEAVES)) + 2.0 * np.eye(LEAVES)[labels]
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    names = [f"leaf {k}" for k in range(LEAVES)] + ["left", "middle", "right", "root"]
    (folder / "wos_tree.json").write_text(json.dumps({"parent": PARENTS, "names": names, "n_leaves": LEAVES, "root": 9}))
    with gzip.open(folder / "wos.jsonl.gz", "wt") as file:
        for k, label in enumerate(labels.tolist()):
            words = " ".join([f"topic{label}"] * 3 + [f"word{v}" for v in random.integers(30, size=6)])
            row = {"id": k, "text": words, "label": label, "parent": PARENTS[label], "split": "score", "sources": []}
            file.write(json.dumps(row | {"random_sample": 1}) + "\n")
    np.savez(
        folder / "scores.npz",
        probs=probs.astype(np.float16),
        label=labels,
        parent=np.array(PARENTS),
        node_names=np.array(names),
        doc_id=np.arange(n),
        random_sample=np.ones(n, dtype=bool),
        n_leaves=LEAVES,
        root=9,
    )
    return root


def faces(root, frontal=16, subjects=8, poses=3, size=32, seed=0):
    """FASSEG in small: a bright disc on a noisy ground; poses 0, 30 and 90 degrees of each subject."""
    folder = root / "fasseg"
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    rows = []
    for name, count, width in (("frontal", frontal, size - 8), ("multipose", subjects * poses, size)):
        centre = random.uniform(0.35, 0.6, size=(count, 2)) * size
        radius = random.uniform(0.2, 0.3, size=count) * size
        face = (x - centre[:, 1, None, None]) ** 2 + (y - centre[:, 0, None, None]) ** 2 < radius[:, None, None] ** 2
        face = face[:, :, :width]
        image = np.clip(80 + 90 * face[..., None] + random.normal(scale=25, size=(*face.shape, 3)), 0, 255).astype(np.uint8)
        hw = np.tile(np.array([size, width], dtype=np.int16), (count, 1))
        np.savez(folder / f"{name}.npz", image=image, label=face.astype(np.uint8), hw=hw, class_names=[], class_rgb=[])
        for k in range(count):
            subject, pose = (k // poses + 1, (0, 30, 90)[k % poses]) if name == "multipose" else ("", 0)
            test = name == "frontal" or int(subject) > subjects // 2
            rows.append(
                {
                    "set": name,
                    "index": k,
                    "split": "test" if test else "train",
                    "included": 1,
                    "set118": int(test and pose < 90),
                    "pose_angle": pose,
                    "pose_bucket": {0: "frontal", 30: "half", 90: "profile"}[pose],
                    "pose_side": "plus" if pose else "none",
                    "subject": subject,
                    "series": "",
                    "ita_tercile_set": k % 3,
                    "image_L_tercile_set": (k // 2) % 3,
                }
            )
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return root
