"""A device for tensors without values, so that code meant for a GPU runs on any machine and a step over the CPU raises."""

import torch

#: torch 2.6 asks the CUDA driver even about fake tensors. Another device that is only a name does as well there.
AWAY = torch.device("cuda" if torch.cuda.is_available() or hasattr(torch._C, "_ensureCUDADeviceGuardSet") else "lazy", 0)
