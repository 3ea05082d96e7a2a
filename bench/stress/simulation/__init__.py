"""The parts of the simulated device of bench/stress/simulated_cuda.py."""
