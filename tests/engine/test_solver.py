"""The solver: states told apart."""

import torch

from torchgmc.engine.solver import fingerprint


def test_fingerprints_tell_states_apart():
    """All states of four levels in -3..3, and no two alike (linear weights fail this: 1, -2, 1)."""
    grid = torch.cartesian_prod(*[torch.arange(-3, 4)] * 4)
    prints = {int(fingerprint(state, torch.tensor(0.01))) for state in grid}
    assert len(prints) == 7**4
    near = torch.tensor([0.1, 0.7]).double()
    assert fingerprint(near, torch.tensor(0.05)) == fingerprint(near - 0.05 + 0.05, torch.tensor(0.05))
