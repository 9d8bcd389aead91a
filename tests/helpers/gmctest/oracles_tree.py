"""Label trees by plain loops over explicit leaf sets: slow, and too simple to be wrong."""

import torch


class SlowTree:
    def __init__(self, parents):
        self.parents = list(parents)
        self.kids = {v: [c for c, p in enumerate(parents) if p == v] for v in range(len(parents))}
        self.leaves = {v: self._leaves(v) for v in range(len(parents))}
        self.num_leaves = sum(not kids for kids in self.kids.values())

    def _leaves(self, v):
        return {v} if not self.kids[v] else set().union(*(self._leaves(c) for c in self.kids[v]))

    def path(self, leaf):
        path = [leaf]
        while self.parents[path[0]] != -1:
            path.insert(0, self.parents[path[0]])
        return path

    def answer(self, row, lam):
        """The highest node of the path to the best leaf with a summed score below lambda; the leaf if none."""
        best = max(range(self.num_leaves), key=lambda k: row[k])
        for node in self.path(best):
            if sum(row[k] for k in self.leaves[node]) < lam:
                return node
        return best

    def covers(self, node, label):
        return label in self.leaves[node]

    def violations(self, rows, labels, lams, sets, target, conditional=False, members=None):
        """Per (group and) set: mean of 1{answer in set} (covered - target), over P(answer in set) if conditional."""
        members = members or [[True]] * len(rows)
        out = []
        for a in range(len(members[0])):
            for nodes in sets:
                total, count = 0.0, 0
                for row, label, lam, member in zip(rows, labels, lams, members, strict=True):
                    node = self.answer(row, lam)
                    if node in nodes and member[a]:
                        total += (1.0 if self.covers(node, label) else 0.0) - target
                        count += 1
                out.append((total / count if count else 0.0) if conditional else total / len(rows))
        return out

    def algorithm(self, rows, labels, sets, target, alpha, eta, init, steps, conditional=False, members=None):
        """Algorithm 1: the log of (g, shift), the worst violation before each step, and the final lambdas."""
        members = members or [[True]] * len(rows)
        lams, log, worst = [init] * len(rows), [], []
        for _ in range(steps):
            table = self.violations(rows, labels, lams, sets, target, conditional, members)
            index = max(range(len(table)), key=lambda j: abs(table[j]))
            worst.append(abs(table[index]))
            if abs(table[index]) <= alpha:
                break
            group, chosen = divmod(index, len(sets))
            nodes = [self.answer(row, lam) for row, lam in zip(rows, lams, strict=True)]
            inside = [n in sets[chosen] and m[group] for n, m in zip(nodes, members, strict=True)]
            shift = eta if table[index] > 0 else -eta
            if conditional:
                shift /= sum(inside) / len(rows)
            lams = [lam - shift if hit else lam for lam, hit in zip(lams, inside, strict=True)]
            log.append((index, shift))
        return log, worst, lams


def random_tree(num_leaves, generator):
    """Parents of a random tree with uneven depths: leaves 0 to K - 1 are joined two or three at a time."""
    parents, open_nodes = [-2] * num_leaves, list(range(num_leaves))
    while len(open_nodes) > 1:
        many = min(len(open_nodes), 2 + int(torch.randint(2, (1,), generator=generator)))
        order = torch.randperm(len(open_nodes), generator=generator)[:many].tolist()
        chosen = [open_nodes[i] for i in order]
        parents.append(-2)
        for node in chosen:
            parents[node] = len(parents) - 1
            open_nodes.remove(node)
        open_nodes.append(len(parents) - 1)
    parents[open_nodes[0]] = -1
    return parents


def random_scores(n, num_leaves, generator, signal=1.5):
    """Labels, and scores in multiples of 2^-10 (sums are exact) that sum to about 1."""
    labels = torch.randint(num_leaves, (n,), generator=generator)
    logits = torch.randn(n, num_leaves, generator=generator)
    logits[torch.arange(n), labels] += signal
    return (logits.softmax(1) * 1024).round() / 1024, labels


TOY = {"Civil": ["Green Building", "Water Pollution"], "Medical": ["Cancer", "Alzheimer's Disease"]}


WOS = [*[12] * 3, *[13] * 4, *[14] * 5, 15, 15, 15, -1]  # 12 leaves under 3 parents


def sample(n, seed, parents=WOS, signal=3.0):
    """A made-up classifier, over-confident in one branch."""
    g = torch.Generator().manual_seed(seed)
    num_leaves = 12
    labels = torch.randint(num_leaves, (n,), generator=g)
    logits = torch.randn(n, num_leaves, generator=g)
    logits[torch.arange(n), labels] += signal
    logits += 0.4 * torch.randn(n, 3, generator=g)[:, torch.tensor(parents[:12]) - 12]
    logits = torch.where((logits.argmax(1) >= 7)[:, None], 1.7 * logits, logits)
    return logits.softmax(1), labels


def random_case(seed, n, num_leaves, signal=1.5):
    g = torch.Generator().manual_seed(seed)
    parents = random_tree(num_leaves, g)
    return (parents, *random_scores(n, num_leaves, g, signal))
