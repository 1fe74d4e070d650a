"""A device that has no kernels: tensors on it are shapes, and reading one is an error.

Running code under ``fake_accelerator()`` proves that it never asks the device for a number and
never mixes devices, which is what a GPU would punish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


def _register() -> str:
    name = torch._C._get_privateuse1_backend_name()
    if name == "privateuseone":
        name = "fakeacc"
        _setup_privateuseone_for_python_backend(name)
        # Registration is for good: what runs later in this process asks the backend for these.
        backend = getattr(torch, name)
        backend.synchronize = lambda *_: None
        backend.get_rng_state = lambda *_: torch.empty(0)
        backend.set_rng_state = lambda *_: None
    return name


@contextmanager
def fake_accelerator() -> Iterator[torch.device]:
    """Fake tensors, and the device to put them on."""
    device = torch.device(f"{_register()}:0")
    with FakeTensorMode():
        yield device


class HostSyncs(TorchDispatchMode):
    """Counts operations that make the host wait for the device."""

    WAITING = frozenset(
        {
            "_local_scalar_dense",
            "nonzero",
            "equal",
            "masked_select",
            "_unique2",
            "unique_dim",
            "is_nonzero",
            "repeat_interleave",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.WAITING or (name.startswith("index") and _boolean_index(args)):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _boolean_index(args):
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in indices)
