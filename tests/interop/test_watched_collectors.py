"""Many workers: one posterior in the learner, whose ε they act with; a dead one is named."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors import MultiAsyncCollector

from bmc_torchrl import BMCEpsilon
from bmc_torchrl.interop.watched_collectors import watched, worker_processes

ROOT = Path(__file__).parents[2]
WARMUP = 200
BATCHES_BEFORE_THE_KILL = 8


class Killer:
    """Kills worker 1 of an example's collector after some batches, remembering what was saved."""

    def __init__(self) -> None:
        self.saved, self.workers, self.pid, self.killed_at = [], [], None, None
        self.save = torch.save

    def watched(self, collector: Any, **settings: Any) -> Any:
        self.collector = collector
        if isinstance(collector, MultiAsyncCollector):
            receive = collector._get_from_queue

            def note_worker(timeout: float) -> Any:
                received = receive(timeout)
                self.workers.append(received[0])
                return received

            collector._get_from_queue = note_worker
        return watched(collector, **settings)

    def remember(self, state: Any, path: Any, *args: Any, **settings: Any) -> None:
        self.save(state, path, *args, **settings)
        if not isinstance(path, Path):
            return
        self.saved.append({name: value.clone() for name, value in state["explore"].items()})
        if len(self.saved) == BATCHES_BEFORE_THE_KILL:
            self.pid = pid_of_worker(self.collector, 1)
            threading.Timer(0.05, self.kill).start()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.killed_at = time.monotonic()


def pid_of_worker(collector: Any, number: int) -> int:
    processes = worker_processes(collector)
    if processes:
        return processes[number].pid
    import ray

    return ray.get(collector.remote_collectors[number].__ray_call__.remote(lambda _: os.getpid()))


def found_in(error: BaseException, name: str) -> Any:
    """A local variable of the function that `error` left."""
    trace = error.__traceback__
    while name not in trace.tb_frame.f_locals:
        trace = trace.tb_next
    return trace.tb_frame.f_locals[name]


def play(name: str, start: str, folder: Path) -> None:
    """In a process of its own: the example with a worker killed, then (forked) to its end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method(start, force=True)
    module, killer = importlib.import_module(name), Killer()
    module.watched = killer.watched
    torch.save = killer.remember
    try:
        module.main(10_000_000, folder / "killed.pt", WARMUP)
    except RuntimeError as error:
        torch.save = killer.save
        result = {
            "error": str(error),
            "seconds": time.monotonic() - killer.killed_at,
            "pid": killer.pid,
            "saved": killer.saved,
            "workers": killer.workers,
            "history": found_in(error, "history"),
        }
        torch.save(result, folder / "result.pt")
    if start == "fork" and name != "ray_collector":
        module.main(300, folder / "finished.pt", 100)


def played(name: str, folder: Path, start: str = "fork") -> dict[str, Any]:
    from commands import SERVED

    process = SERVED.Process(target=play, args=(name, start, folder))
    process.start()
    process.join(500)
    assert process.exitcode == 0
    return torch.load(folder / "result.pt", weights_only=True)


def played_in_a_fresh_interpreter(name: str, folder: Path) -> dict[str, Any]:
    """Ray's workers find modules by the variable that the interpreter was started with."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, name, "fork", folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "scripts/examples")},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt", weights_only=True)


def assert_dies_well(result: dict[str, Any], folder: Path, cause: str) -> None:
    checkpoint = folder / "killed.pt"
    assert result["error"].startswith(f"Worker 1 (pid {result['pid']}")
    assert cause in result["error"]
    assert result["error"].endswith(f"the last checkpoint is {checkpoint}.")
    assert result["seconds"] < 60
    loaded = torch.load(checkpoint, weights_only=True)["explore"]
    assert len(result["saved"]) >= BATCHES_BEFORE_THE_KILL
    for key, value in result["saved"][-1].items():
        assert torch.equal(loaded[key], value)


def assert_leaves_out_the_warmup(result: dict[str, Any]) -> None:
    """The posterior has counted every frame that the policy took, and no other."""
    marks = [batch["acted_with"] > 0 for batch in result["history"]]
    assert sum(int((~taken).sum()) for taken in marks) >= WARMUP
    for number, state in enumerate(result["saved"]):
        counted = sum(int(taken.sum()) for taken in marks[: number + 1])
        assert int(state["strategy.return_count"]) == counted
    assert result["saved"][-1]["strategy.return_count"] > 0


def as_recorded(history: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([batch["epsilon"] for batch in history], dtype=torch.float64).float()


def assert_every_batch_has_the_learners_epsilon(result: dict[str, Any]) -> None:
    epsilons = as_recorded(result["history"])
    for epsilon, batch in zip(epsilons, result["history"], strict=True):
        assert batch["acted_with"].shape == (2, 50)
        if batch["acted_with"].any():
            assert (batch["acted_with"] == epsilon).all()
    learnt = epsilons[WARMUP // 100 :]
    assert (learnt.diff() < 0).all()


@pytest.mark.slow
def test_workers_in_step_act_with_the_epsilon_that_the_last_update_left(tmp_path: Path) -> None:
    result = played("workers_multi_sync", tmp_path, start="spawn")
    assert_every_batch_has_the_learners_epsilon(result)
    assert_leaves_out_the_warmup(result)
    assert_dies_well(result, tmp_path, "ended with exit code -9")


@pytest.mark.slow
def test_workers_out_of_step_act_with_an_epsilon_that_the_learner_had(tmp_path: Path) -> None:
    result = played("workers_multi_async", tmp_path)
    epsilons = as_recorded(result["history"]).tolist()
    began, behind = {0: 0, 1: 0}, 0
    for number, batch in enumerate(result["history"]):
        worker = result["workers"][number]
        acted = batch["acted_with"][batch["acted_with"] > 0].tolist()
        assert acted == sorted(acted, reverse=True)
        # A worker goes on when its last batch is received, before the learner learns from it.
        assert set(acted) <= set(epsilons[began[worker] : number + 1])
        behind += sum(epsilon > epsilons[number] for epsilon in acted)
        began[worker] = number
    assert behind > 0
    assert_leaves_out_the_warmup(result)
    assert_dies_well(result, tmp_path, "ended with exit code -9")
    assert (tmp_path / "finished.pt").exists()


@pytest.mark.slow
def test_parallel_environments_are_stepped_with_the_learners_epsilon(tmp_path: Path) -> None:
    result = played("workers_parallel_env", tmp_path)
    assert_every_batch_has_the_learners_epsilon(result)
    assert_leaves_out_the_warmup(result)
    assert_dies_well(result, tmp_path, "ended with exit code -9")
    assert (tmp_path / "finished.pt").exists()


@pytest.mark.slow
def test_rays_workers_act_with_the_epsilon_that_was_sent_to_them(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install -c constraints.txt '.[examples]'")
    result = played_in_a_fresh_interpreter("ray_collector", tmp_path)
    assert_every_batch_has_the_learners_epsilon(result)
    assert_leaves_out_the_warmup(result)
    assert_dies_well(result, tmp_path, "Worker exit type: SYSTEM_ERROR")


class Sleepers:
    """What `watched` needs of a collector: processes, and an end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.procs = [context.Process(target=time.sleep, args=(300,)) for _ in range(3)]
        for process in self.procs:
            process.start()

    def shutdown(self) -> None:
        self.ended = True


def test_a_block_that_waits_for_a_dead_worker_is_interrupted(tmp_path: Path) -> None:
    collector = Sleepers()
    began, pid = time.monotonic(), collector.procs[2].pid
    message = rf"^Worker 2 \(pid {pid}\) ended with exit code -9; there is no checkpoint\.$"
    os.kill(pid, signal.SIGKILL)
    with (
        pytest.raises(RuntimeError, match=message),
        watched(collector, checkpoint=tmp_path / "none.pt", grace=0.5),
    ):
        time.sleep(300)
    assert time.monotonic() - began < 60
    assert collector.ended
    assert not any(process.is_alive() for process in collector.procs)


def test_an_error_of_the_block_is_its_own_while_all_workers_live() -> None:
    collector = Sleepers()
    with pytest.raises(ZeroDivisionError), watched(collector):
        raise ZeroDivisionError
    assert collector.ended
    assert not any(process.is_alive() for process in collector.procs)


def streams(kind: str, workers: int = 8, steps: int = 1000) -> tuple[Tensor, Tensor]:
    """Greedy and uniform returns, ``[workers, time]``."""
    draws = torch.randn(workers, steps, dtype=torch.float64)
    gap = 0.2 * torch.rand(workers, steps, dtype=torch.float64)
    if kind == "growing":
        scale = torch.linspace(1, 10, steps, dtype=torch.float64)
        draws, gap = draws * scale, gap * scale
    if kind == "different":
        draws = draws + torch.linspace(-3, 3, workers, dtype=torch.float64).unsqueeze(-1)
    return draws + gap, draws


def learnt(greedy: Tensor, uniform: Tensor, batch_shape: Sequence[int] = ()) -> BMCEpsilon:
    strategy = BMCEpsilon(alpha0=1.0, beta0=1.01, batch_shape=batch_shape)
    strategy.update(TensorDict({"greedy_return": greedy, "uniform_return": uniform}, greedy.shape))
    return strategy


def test_streams_of_workers_are_one_stream_by_step_and_within_a_step_by_worker() -> None:
    greedy, uniform = streams("growing", workers=3, steps=20)
    together, alone = learnt(greedy, uniform), BMCEpsilon(alpha0=1.0, beta0=1.01)
    for step in range(20):
        for worker in range(3):
            one = {"greedy_return": greedy[worker, step], "uniform_return": uniform[worker, step]}
            alone.update(TensorDict(one))
    for name, value in together.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


def test_another_order_of_workers_matters_little_and_one_stream_after_another_much() -> None:
    def ordered(values: Tensor) -> Tensor:
        """By worker within a step, by worker backwards, and one stream after the other."""
        return torch.stack([x.flatten() for x in (values.T, values.flip(0).T, values)])

    greedy, uniform = zip(*map(streams, ("alike", "growing", "different")), strict=True)
    returns = [torch.stack(list(map(ordered, values))) for values in (greedy, uniform)]
    strategy = learnt(*returns, batch_shape=[3, 3])
    within, backwards, one_by_one = strategy.eps.unbind(-1)
    another, concatenated = (backwards / within - 1).abs(), (one_by_one / within - 1).abs()
    assert ((another > 0) & (another < 1e-3)).all()
    assert 1e-4 < concatenated[0] < 0.05
    assert (concatenated[1:] > 0.2).all()


if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
