"""Pure decisions: no torch, no I/O, no threads, no clock. `now` is always an argument."""
