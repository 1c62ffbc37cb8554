"""What an MLA user would run instead, measured beside the schemes of this library: `python -m benchmarks.peers`."""
