"""With TorchRL's own trainers and collectors."""
