"""Parts of the simulated device: bench/stress/simulated_cuda.py."""
