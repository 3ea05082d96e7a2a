"""Parts of the simulated device: bench/simulated_cuda.py."""
