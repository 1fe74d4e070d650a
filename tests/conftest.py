import warnings

import pytest
import torch

with warnings.catch_warnings():
    # TorchRL's collectors warn about themselves when first imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torchrl.collectors  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def random():
    return torch.Generator().manual_seed(5)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
