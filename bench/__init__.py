"""Measurements of r3lite and of what else can do its work; results are committed under bench/results."""
