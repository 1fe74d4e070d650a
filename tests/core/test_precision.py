"""Which numbers keep their precision, and where they are."""

import pytest
import torch

from bmc_torchrl.learners.rules import PublishedDQN
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.precision import KeepsPrecision


class Mixed(KeepsPrecision):
    """Counts in float64, which it keeps, and means, which it does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(2.0**40 + 1, dtype=torch.float64))
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("nothing", None)

    def keeps(self, name, buffer):
        return name == "count"


casts = pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: torch.nn.Sequential(m).double()[0], torch.float64),
    ],
)


@casts
def test_a_subclass_says_which_buffers_are_kept(cast, dtype):
    module = Mixed()
    where = module.count.data_ptr()
    module = cast(module)
    assert module.mean.dtype == dtype
    assert module.count == 2.0**40 + 1
    assert module.count.data_ptr() == where
    assert module.to("meta").count.device.type == module.mean.device.type == "meta"


@casts
def test_adams_counts_are_kept_and_its_moments_follow_the_weights(cast, dtype):
    network = QNetwork(4, 2, [3], runs=2)
    rule = cast(PublishedDQN(network, runs=2, gamma=0.9))
    kinds = {
        kind: value.dtype
        for moments in rule.adam.state().values()
        for kind, value in moments.items()
    }
    counts = [kind for kind, kept in kinds.items() if kept == torch.float64]
    assert counts
    assert dtype == torch.float64 or set(kinds.values()) == {dtype, torch.float64}
