"""The paper's three domains as batched, device-resident TorchRL environments."""
