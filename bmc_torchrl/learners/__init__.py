"""How Q is represented and how it learns."""
