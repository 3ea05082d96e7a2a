"""Benches that break things or take long: faults, soaks, load, a simulated card. README.md lists them."""
