"""The commands: settings, jobs, sweeps; the only room that knows Hydra and OmegaConf."""
