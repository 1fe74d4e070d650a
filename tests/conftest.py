import os
import warnings
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    # TorchRL's collectors warn about themselves when first imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torchrl.collectors  # noqa: F401

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--published",
        default=os.environ.get("BMC_PUBLISHED"),
        metavar="FOLDER",
        help="folder with the authors' workbooks, grid_sarsa.xlsx and so on (or BMC_PUBLISHED)",
    )


@pytest.fixture
def published(pytestconfig):
    """The folder with the authors' workbooks; docs/protocol.md says where to get them."""
    folder = pytestconfig.getoption("published")
    if not folder:
        pytest.skip("needs the authors' workbooks: pytest --published FOLDER, or BMC_PUBLISHED")
    return Path(folder)


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
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
