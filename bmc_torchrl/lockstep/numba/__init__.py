"""Many runs on CPU cores: a compiled loop per run."""
