"""Devices: number formats, loss scaling and random generators. Knows no model."""
