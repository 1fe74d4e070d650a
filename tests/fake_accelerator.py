"""A device that has no kernels: tensors on it are shapes, and reading one is an error.

Running code under ``fake_accelerator()`` proves that it never asks the device for a number and
never mixes devices, which is what a GPU would punish. ``traced()`` gives the graph of what it does
there, and ``what_a_gpu_would_mind()`` all that keeps that graph from being captured once and
replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

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
        "multinomial",
        "randperm",
    }
)
"""Operations that make the host wait for the device."""


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


def lookalike(thing: Any, device: torch.device) -> tuple[Any, list[Tensor]]:
    """A deep copy whose tensors are fakes on `device`, as are devices in it; and these tensors."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__deepcopy__", fake)
        patch.setattr(nn.Parameter, "__deepcopy__", fake)
        for kind, copied in {
            TensorDict: lambda td, memo: td.apply(lambda x: fake(x, memo), filter_empty=False),
            torch.device: lambda *_: device,
            torch.Generator: lambda generator, _: generator,
        }.items():
            patch.setitem(copy._deepcopy_dispatch, kind, copied)
        return copy.deepcopy(thing), list(made.values())


def traced(work: Callable[[], Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of `work`, which reads and writes `inputs` and no other tensors from outside."""
    return make_fx(lambda *_: work())(*inputs)


def what_a_gpu_would_mind(graph: fx.GraphModule) -> list[str]:
    """Waiting for the device, leaving it, and what inductor says cannot be captured."""
    # Not public in torch.
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    waits = [str(node) for node in nodes if _name(node) in WAITING]
    devices = {tensor.device for node in graph.graph.nodes for tensor in _tensors(node)}
    leaves = [] if len(devices) <= 1 else [f"devices {sorted(map(str, devices))}"]
    for node in nodes:  # Inductor does not know the profiler's marks around an optimiser's step.
        if isinstance(node.meta.get("val"), torch.ScriptObject):
            del node.meta["val"]
    unsafe = get_first_incompatible_cudagraph_node(graph)
    return waits + leaves + ([] if unsafe is None else [f"inductor: {unsafe}"])


def rewritten(graph: fx.GraphModule) -> set[int]:
    """Which inputs are written in place, by number."""
    owner: dict[int, int] = {}
    written: set[int] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            owner[_storage(node)] = len(owner)
        elif node.op == "call_function" and hasattr(node.target, "_schema"):
            schema = node.target._schema.arguments
            given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
            for argument in schema:
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = given[argument.name]
                for each in value if isinstance(value, list | tuple) else [value]:
                    written |= {owner[s] for s in [_storage(each)] if s in owner}
    return written


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, Tensor)]


def _storage(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


class HostSyncs(TorchDispatchMode):
    """Counts operations that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WAITING or (name.startswith("index") and _boolean_index(args)):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _boolean_index(args):
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in indices)
