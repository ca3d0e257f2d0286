"""Property tests side by side with the installed packages verl 0.9.1 and TRL 1.16.0; docs/peers.md lists every difference."""
