"""Label trees: structure, scores along the path to the best leaf, and the answers a threshold gives.

A node answers for all leaves below it. Along the path from the root to the best-scored leaf u the summed scores fall, and a
threshold lambda answers with the highest node whose score is below lambda, or with u itself if none is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.engine import checks, hashing
from torchgmc.engine.float64 import wide

#: Nodes in the paths of all leaves.
MOST = 2 * 10**7
#: Scores whose keys, of 22 bits each, times weights of 22 bits have an exact sum in float64.
EXACT = 2000
#: Scores in the cache of a processor.
IN_CACHE = 3 << 16


class Tree:
    """A rooted tree whose leaves are 0, ..., K - 1, the columns of the scores.

    Args:
        parents: one of

            - the parent of every node, root -1: a list, array or tensor of length V; the K nodes without children must be 0 to
              K - 1;
            - nested dicts and lists of class names: ``{"Civil": ["Green Building", "Water Pollution"], "Medical": [...]}``; the
              leaves are numbered in the order written;
            - a list of paths, one per leaf, from below the root to the leaf: ``[("Civil", "Green Building"), ...]``.

        names: names of the nodes when ``parents`` is an array; "0", "1", ... by default.

    Attributes:
        parents, names: per node, length V. In the last two forms the root is node K and is called "root".
        num_leaves, num_nodes, root, height: K, V, the root, and the number of edges on the longest path.
        paths: nodes from the root to each leaf, ``(K, height + 1)``, padded with the leaf.
        depths: edges between the root and each node, ``(V,)``.
        order: the leaves from left to right, ``(K,)``, and ``place``, its inverse.
        spans: the leaves below node v are ``order[spans[v, 0] : spans[v, 1]]``, ``(V, 2)``.

    Example:
        >>> tree = Tree({"Civil": ["Green Building", "Water Pollution"], "Medical": ["Cancer", "Alzheimer's"]})
        >>> tree.parents
        [5, 5, 6, 6, -1, 4, 4]
        >>> [tree.names[v] for v in tree.paths[2]]
        ['root', 'Medical', 'Cancer']
    """

    def __init__(self, parents: Any, names: Sequence[str] | None = None) -> None:
        self.parents, self.names = _read(parents, names)
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        self.num_nodes = len(self.parents)
        self.num_leaves = sum(not below for below in children)
        self.root = self.parents.index(-1)
        if self.num_leaves < 2:
            raise ValueError(f"`parents` must describe a tree with at least 2 leaves, got {self.num_leaves}.")
        for node in range(self.num_leaves):
            if children[node]:
                raise ValueError(
                    f"`parents` must number the {self.num_leaves} leaves 0 to {self.num_leaves - 1}, like the columns of the "
                    f"scores, but node {node} ({self.names[node]!r}) has children; renumber the nodes."
                )
        self.children = children
        self._walk()

    def _walk(self) -> None:
        """One walk from the root gives depths, paths and spans; nodes it does not reach form a cycle."""
        depths, first, last = [-1] * self.num_nodes, [0] * self.num_nodes, [0] * self.num_nodes
        order: list[int] = []
        routes: list[list[int]] = [[] for _ in range(self.num_leaves)]
        stack, route, steps = [(self.root, 0)], list[int](), 0
        while stack:
            node, entered = stack.pop()
            if entered:
                last[node] = len(order)
                route.pop()
                continue
            depths[node], first[node] = len(route), len(order)
            route.append(node)
            stack.append((node, 1))
            if node < self.num_leaves:
                order.append(node)
                routes[node] = list(route)
                steps += len(route)
                self._check_depth(steps)
            stack.extend((child, 0) for child in reversed(self.children[node]))
        lost = [v for v, depth in enumerate(depths) if depth < 0]
        if lost:
            raise ValueError(f"`parents` has a cycle: node {lost[0]} ({self.names[lost[0]]!r}) is not below the root.")
        self.height = max(depths)
        width = self.height + 1
        self._check_depth(width * self.num_leaves)
        self.paths = torch.tensor([route + [leaf] * (width - len(route)) for leaf, route in enumerate(routes)])
        self.depths = torch.tensor(depths)
        self.order = torch.tensor(order)
        self.place = self.order.argsort()
        self.spans = torch.tensor([first, last]).T.contiguous()

    def _check_depth(self, steps: int) -> None:
        if steps > MOST:
            raise ValueError(f"`parents` is too deep a tree: the paths to its {self.num_leaves} leaves have over {MOST} nodes.")

    @property
    def sizes(self) -> Tensor:
        """Leaves below each node, ``(V,)``."""
        return self.spans[:, 1] - self.spans[:, 0]

    def below(self, node: int) -> list[int]:
        """The node and everything below it."""
        inside, todo = [], [node]
        while todo:
            inside.append(todo.pop())
            todo.extend(self.children[inside[-1]])
        return sorted(inside)

    def find(self, node: Any) -> int:
        """Id of a node given by id or name."""
        if isinstance(node, str):
            node = checks.printable(node)
            if node not in self.names:
                raise ValueError(f"the tree has no node {node!r}; it has {', '.join(map(repr, self.names[:8]))}, ...")
            return self.names.index(node)
        number = int(node)
        if not 0 <= number < self.num_nodes:
            raise ValueError(f"the tree has nodes 0 to {self.num_nodes - 1}, got {node!r}.")
        return number

    def node_sets(self, sets: Any) -> dict[str, list[int]]:
        """Named sets of nodes.

        ``sets``: None for every child of the root with all below it, and all nodes; ``"nodes"`` for every node by itself
        (leaves and root too); or a mapping from a name to nodes (ids or names).

        Example:
            >>> Tree([3, 3, 4, 4, -1]).node_sets(None)
            {'2': [2], '3': [0, 1, 3], 'all': [0, 1, 2, 3, 4]}
        """
        if sets is None:
            branches = {self.names[v]: self.below(v) for v in self.children[self.root]}
            return branches | {"all" if "all" not in branches else "all nodes": list(range(self.num_nodes))}
        if isinstance(sets, str):
            if sets != "nodes":
                raise ValueError(f"`sets` must be None, 'nodes' or a mapping from names to nodes, got {sets!r}.")
            return {name: [node] for node, name in enumerate(self.names)}
        if not isinstance(sets, Mapping) or not sets:
            raise TypeError(
                f"`sets` must be None, 'nodes' or a mapping from names to nodes such as {{'Medical': [3, 4, 6]}}, got {sets!r}."
            )
        found = {}
        for name, nodes in sets.items():
            if isinstance(nodes, str) or not isinstance(nodes, Sequence | Tensor) or not len(nodes):
                raise TypeError(f"`sets[{name!r}]` must be a non-empty list of nodes (ids or names), got {nodes!r}.")
            found[checks.printable(str(name))] = sorted({self.find(node) for node in nodes})
        return found


def _read(parents: Any, names: Sequence[str] | None) -> tuple[list[int], list[str]]:
    if isinstance(parents, Mapping):
        return _from_paths(_unnest(parents), names)
    if isinstance(parents, Sequence) and len(parents) and isinstance(parents[0], Sequence):
        if all(isinstance(path, str) and "/" in path for path in parents):
            first = str(parents[0])
            raise ValueError(f"`parents`: a path is a tuple of names, {tuple(first.split('/'))}, not {first!r}.")
        return _from_paths([tuple(path) if not isinstance(path, str) else (path,) for path in parents], names)
    if isinstance(parents, Sequence) and all(type(parent) is int for parent in parents):
        found = list(parents)
    else:
        found = _read_array(parents)
    if found.count(-1) != 1:
        raise ValueError(f"`parents` must mark exactly one root with -1, got {found.count(-1)} of them.")
    for node, parent in enumerate(found):
        if (parent != -1 and not 0 <= parent < len(found)) or parent == node:
            raise ValueError(f"`parents`[{node}] must be another node, 0 to {len(found) - 1}, or -1 for the root, got {parent}.")
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise TypeError(f"`names` must be a list with one name per node, got {names!r:.80}.")
    labels = [str(node) for node in range(len(found))] if names is None else [checks.printable(str(name)) for name in names]
    if len(labels) != len(found):
        raise ValueError(f"`names` must have {len(found)} names, one per node, got {len(labels)}.")
    twice = sorted(name for name, times in Counter(labels).items() if times > 1)[:4]
    if twice:
        raise ValueError(f"`names` has repeated names: {', '.join(map(repr, twice))}; each node needs its own name.")
    return found, labels


def _read_array(parents: Any) -> list[int]:
    try:
        array = torch.as_tensor(parents)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"`parents` must be the parent of every node, nested dicts of names or a list of paths, got {type(parents).__name__}."
        ) from error
    if array.dim() != 1 or array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
        raise ValueError(f"`parents` must hold one node id per node, got shape {tuple(array.shape)} of {array.dtype}.")
    return [int(v) for v in array.tolist()]


def _unnest(tree: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of nested dicts and lists; a name with nothing below is a leaf."""
    if tree is None or (isinstance(tree, Mapping | Sequence) and not isinstance(tree, str) and not len(tree)):
        return [above]
    if isinstance(tree, Mapping):
        return [path for name, part in tree.items() for path in _unnest(part, (*above, str(name)))]
    if isinstance(tree, str):
        return [(*above, tree)]
    if isinstance(tree, Sequence):
        return [path for part in tree for path in _unnest(part, above)]
    raise TypeError(f"`parents` as nested names may hold dicts, lists and strings, got {type(tree).__name__}.")


def _from_paths(paths: list[tuple[str, ...]], names: Sequence[str] | None) -> tuple[list[int], list[str]]:
    if names is not None:
        raise ValueError("pass `names` only when `parents` is an array; nested dicts and paths already hold the names.")
    routes = [tuple(checks.printable(str(part)) for part in path) for path in paths]
    if len(set(routes)) < len(routes) or not all(routes):
        raise ValueError("`parents` names a leaf twice or has an empty path; each leaf needs its own path.")
    ids: dict[tuple[str, ...], int] = {route: leaf for leaf, route in enumerate(routes)}
    ids[()] = len(routes)
    parents = [-2] * len(routes) + [-1]
    for route in routes:
        for length in range(1, len(route)):
            if route[:length] not in ids:
                ids[route[:length]] = len(parents)
                parents.append(ids[route[: length - 1]])
        if ids[route[:-1]] < len(routes):
            raise ValueError(f"`parents` has {'/'.join(route[:-1])!r} both as a leaf and with {route[-1]!r} below it.")
        parents[ids[route]] = ids[route[:-1]]
    last = [route[-1] if route else "root" for route in ids]  # in the order of their ids
    times = Counter(last)
    return parents, [name if times[name] == 1 else "/".join(route) or "root" for route, name in zip(ids, last, strict=True)]


def path_levels(
    probs: Tensor, paths: Tensor, depths: Tensor, order: Tensor, spans: Tensor, width: float, version: int = 2
) -> tuple[Tensor, Tensor]:
    """Best leaf of each example, and the level that lambda must exceed to answer at or above each node of its path.

    The level at depth k is the least summed score among the path's nodes down to depth k (scores fall along a path by
    themselves; noise of half-width ``width`` may say otherwise), and -inf from the leaf on, which answers if nothing else
    does. An answer has as many edges below the root as there are levels at or above lambda.

    ``probs``: shape ``(n, K)``, any floating type; sums are :func:`wide`. ``paths``, ``depths``, ``order``, ``spans``: of
    the :class:`Tree`. ``width``: half-width of the noise, drawn from the row of ``probs`` and the depth. ``version``: of
    :func:`torchgmc.engine.hashing.keys`. Returns: leaves: int64, ``(n,)``. levels: float64, ``(n, height)``, falling from left
    to right.
    """
    sums = wide(probs).index_select(1, order).cumsum(1)
    sums = torch.cat([torch.zeros_like(sums[:, :1]), sums], 1)  # (n, K + 1)
    bits = sums[:, :1]
    if width > 0.0:
        depth = hashing.mix(hashing.places(paths.shape[1] - 1, probs.device))
        bits = hashing.mix(hashing.wrap(hashing.keys(probs.detach(), version)[:, None] + depth))
    leaves = probs.argmax(1)
    nodes = paths[leaves][:, : paths.shape[1] - 1]
    levels = sums.gather(1, spans[:, 1][nodes]) - sums.gather(1, spans[:, 0][nodes])  # (n, height)
    return leaves, _falling(levels, bits, leaves, depths, width)


def _falling(levels: Tensor, bits: Tensor, leaves: Tensor, depths: Tensor, width: float) -> Tensor:
    """Levels of :func:`path_levels` from the summed scores and the bits of the noise, ``(n, height)`` each."""
    if width > 0.0:
        levels = levels + width * (bits.to(levels.dtype) * 4.76837158203125e-07 - 1.0)
    columns = [levels[:, 0]]
    for k in range(1, levels.shape[1]):
        columns.append(torch.minimum(columns[k - 1], levels[:, k]))
    below = torch.arange(levels.shape[1], device=levels.device) >= depths[:, None]  # from the leaf on
    ends = torch.zeros_like(below, dtype=levels.dtype).masked_fill(below, -float("inf"))
    return torch.stack(columns, 1) + ends.index_select(0, leaves)


def path_levels_in_blocks(
    probs: Tensor, paths: Tensor, depths: Tensor, order: Tensor, spans: Tensor, width: float, version: int, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`path_levels` of probabilities on the CPU, to the bit, and a copy of ``seen``, some columns of them.

    In blocks that stay in the cache, in the same memory. A sum waits for the one before it, so two rows are summed at a time,
    as one complex number.
    """
    count, size = probs.shape
    rows = -(-count // -(-count * size // IN_CACHE))
    half, kind = (rows + 1) // 2, torch.float64 if probs.dtype == torch.float64 else torch.float32
    weights = torch.split(hashing.wrap(hashing.key_weights(size, probs.device, version)), EXACT)
    plain, ordered, whole = (torch.empty(2 * half, size, dtype=one) for one in (kind, kind, torch.float64))
    sums = torch.zeros(half, 2 * size + 2, dtype=torch.float64)
    pairs, chosen, exact, to = (torch.view_as_complex(t.view(half, -1, 2)) for t in (plain, ordered, whole, sums))
    plain, whole, to = plain[:rows], whole[:rows], to[:, 1:]
    row, ends = np.arange(rows)[:, None], 2 * spans[paths[:, :-1]].flatten(1).numpy()  # (K, 2 height): starts and ends
    row = np.where(row < half, row * sums.shape[1], (row - rows + half) * sums.shape[1] + 1)  # real and imaginary parts
    columns, places = torch.split(whole, EXACT, 1), order.numpy()
    leaves, keys = torch.empty(count, dtype=torch.int64), torch.empty(len(weights), count, dtype=torch.float64)
    found, picked = torch.empty(count, ends.shape[1], dtype=torch.float64), torch.empty(seen.shape, dtype=seen.dtype)
    for start in range(0, count, rows):
        first = min(start, count - rows)  # the last block may begin in the one before
        here = slice(first, first + rows)
        leaf, some = leaves[here], probs[here].to(kind)
        some.numpy().argmax(1, leaf.numpy())  # the first of equal ones, as in torch; 4 times as fast
        picked[here] = seen[here]
        torch.complex(some[:half], some[rows - half :], out=pairs)  # the middle one of an odd number twice
        np.take(pairs.numpy(), places, 1, chosen.numpy(), "wrap")  # it takes 8 bytes at a time
        torch.cumsum(exact.copy_(chosen), 1, out=to)
        sums.numpy().take(ends.take(leaf.numpy(), 0) + row, out=found.numpy()[here], mode="wrap")
        whole.copy_(torch.mul(some, 1048576.0, out=plain).floor_())  # below 2^22: nothing to wrap
        for part, weight, key in zip(columns, weights, keys, strict=True):
            torch.mv(part, weight, out=key[here])
    depth, bits = torch.arange(paths.shape[1] - 1, dtype=torch.int32), hashing.wrap(keys).sum(0).to(torch.int32)
    noise = hashing.mix(hashing.mix(bits)[:, None] + hashing.mix(depth))
    return leaves, _falling(found[:, 1::2] - found[:, ::2], noise, leaves, depths, width), picked


def answers(levels: Tensor, routes: Tensor, lam: Tensor) -> Tensor:
    """Node that lambda answers with: levels ``(n, height)``, routes ``(n, height + 1)``, lambda ``(n,)`` -> ``(n,)``."""
    depth = (levels >= lam[:, None]).to(torch.int64).sum(1)
    return routes.gather(1, depth[:, None])[:, 0]


def replay(levels: Tensor, routes: Tensor, member: Tensor, shifts: Tensor, base: Tensor) -> Tensor:
    """Lambda of each example: start at ``base``; each round takes off the shift of the node answered so far.

    ``levels``, ``routes``: of :func:`path_levels` and ``paths[leaves]``. ``member``: static membership, float64, ``(n, a)``.
    ``shifts``: per round, node and group, ``(R, V, a)``. ``base``: f0, a scalar.
    """
    lam = torch.zeros_like(levels[:, 0]) + base
    for r in range(shifts.shape[0]):
        lam = lam - (shifts[r][answers(levels, routes, lam)] * member).sum(1)
    return lam


def rounds(tree: Tree, sets: Tensor, who: list[int], shift: list[float], num_groups: int) -> Tensor:
    """The update log as a table ``(R, V, a)`` of rounds, each of steps that commute.

    An example only ever answers with a node on the path to its best leaf. So two steps whose sets lie on no common path touch
    different examples whatever the order, and share a round; steps over all nodes do not look at lambda, and neighbours add up.

    ``tree``: the tree. ``sets``: nodes of each set, bool, ``(V, q)``. ``who``: the g of each step, group * q + set. ``shift``:
    what each step takes off lambda. ``num_groups``: a.
    """
    sets = sets.cpu()
    q = sets.shape[1]
    touched = torch.stack([sets[tree.paths, j].any(1) for j in range(q)], 1)  # (K, q): does the leaf's path meet the set?
    everything = sets.all(0).tolist()
    depth = torch.zeros(tree.num_leaves, dtype=torch.int64)  # rounds so far, per leaf
    table: list[Tensor] = []
    flat: list[bool] = []  # rounds of steps over all nodes
    for index, value in zip(who, shift, strict=True):
        group, chosen = divmod(index, q)
        here = touched[:, chosen]
        at = int(depth[here].max())
        if everything[chosen] and at > 0 and flat[at - 1] and bool((depth == at).all()):
            at -= 1
        if at == len(table):
            table.append(torch.zeros(tree.num_nodes, num_groups, dtype=torch.float64))
            flat.append(everything[chosen])
        table[at][sets[:, chosen], group] += value
        depth[here] = at + 1
    return torch.stack(table) if table else torch.zeros(0, tree.num_nodes, num_groups, dtype=torch.float64)
