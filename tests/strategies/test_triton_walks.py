"""The kernels for CUDA: what they compute, and that they compile for GPUs that are not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from walk_cases import BMC, PRIOR, STATES, assert_equal_states, by_operator, collected

from bmc_torchrl.strategies import BMCEpsilon, VDBEEpsilon, bmc, vdbe

pytest.importorskip("triton")
INTERPRETED = Path(__file__).with_name("interpreted_walks.py")
STRATEGIES = {
    **{name: lambda shape, o=o: BMCEpsilon(batch_shape=shape, **o) for name, o in BMC.items()},
    "vdbe": lambda shape: VDBEEpsilon(STATES, 1.0, 0.25, batch_shape=shape),
}
each_strategy = pytest.mark.parametrize("build", list(STRATEGIES.values()), ids=list(STRATEGIES))


@pytest.mark.slow
def test_the_kernels_compute_what_the_tensor_functions_and_algorithm_1_do():
    # The interpreter must be chosen before triton is imported.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(INTERPRETED)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\n2[0-9] passed", done.stdout), done.stdout


class NoLaunch:
    """A kernel that is compiled as if it were launched on a GPU of some kind."""

    def __init__(self, kernel, target):
        self.kernel, self.target, self.compiled = kernel, target, []

    def __getitem__(self, grid):
        def compile_for(*arguments, **options):
            shown = [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]
            self.compiled.append(self.kernel.warmup(*shown, grid=grid, **options))

        return compile_for

    @staticmethod
    def get_current_device():
        return 0

    @staticmethod
    def get_current_stream(device):
        return 0

    def get_current_target(self):
        return self.target


@each_strategy
@pytest.mark.parametrize("capability", [80, 90])
def test_the_call_on_a_gpu_compiles_without_one(build, capability, monkeypatch, tmp_path, random):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from bmc_torchrl.strategies import triton_walks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    strategy = build((3,))
    name = "walk_states" if isinstance(strategy, VDBEEpsilon) else "walk_posteriors"
    kernel = getattr(triton_walks, name)
    kernel.device_caches.clear()
    target = GPUTarget("cuda", capability, 32)
    there = NoLaunch(kernel, target)
    monkeypatch.setattr(driver, "_active", there)
    monkeypatch.setattr(triton_walks, name, there)
    by_operator(monkeypatch)
    monkeypatch.setattr(bmc, "bmc_walk", triton_walks.bmc_walk_on_gpu)
    monkeypatch.setattr(vdbe, "vdbe_walk", triton_walks.vdbe_walk_on_gpu)
    strategy.update(*collected((3,), random, 4))
    (made,) = there.compiled
    assert f"sm_{capability}" in made.asm["ptx"]
    assert len(made.asm["cubin"]) > 1000
    divisions = set(re.findall(r"\bdiv\.\S+", made.asm["ptx"]))
    assert divisions == {"div.rn.f64"}, "rounded as on a CPU"


@pytest.mark.gpu
@each_strategy
@pytest.mark.parametrize("shape", [(), (3,), (500,)])
def test_a_gpu_walks_as_a_cpu_does(build, shape, random):
    here, there = build(shape), build(shape).cuda()
    for _ in range(2):
        data, taken = collected(shape, random)
        here.update(data, taken)
        there.update(data.cuda(), taken.cuda())
    assert_equal_states(there.cpu(), here, rtol=1e-12)


@pytest.mark.gpu
def test_a_captured_walk_learns_at_every_replay(random):
    strategy, expected = (BMCEpsilon(prior=PRIOR, batch_shape=(3,)).cuda() for _ in range(2))
    data, taken = (x.cuda() for x in collected((3,), random))
    start = strategy.state_dict()
    kept = {key: value.clone() for key, value in start.items()}
    strategy.update(data, taken)
    torch.cuda.synchronize()
    strategy.load_state_dict(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strategy.update(data, taken)
    for _ in range(3):
        graph.replay()
        expected.update(data, taken)
    assert_equal_states(strategy, expected, rtol=1e-15)
