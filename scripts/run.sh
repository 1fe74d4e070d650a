#!/usr/bin/env bash
# Runs the main job, after setting up .venv where there is none: bash scripts/run.sh [overrides]
# CartPole, DQN with TorchRL's loss and replay in Lightning: ε-BMC beside TorchRL's default annealing
# and a constant, 8 runs each, tracked offline in W&B and CSV. Then the grid-world in tables, the
# one-hot special case, in seconds.
set -eu
. "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=1
python -m bmc_torchrl train experiment=cartpole_dqn sweep=main 'strategies=[bmc,linear,fixed_01]' runs=8 \
  episodes=60 domain.max_steps=200 domain.test_every=3 learner.torchrl=true logger=wandb \
  output=outputs/main/cartpole "$@"
python -m bmc_torchrl train experiment=grid_sarsa 'strategies=[bmc,fixed_01,geom_095,power_05,vdbe_005]' \
  runs=100 output=outputs/main/grid "$@"
