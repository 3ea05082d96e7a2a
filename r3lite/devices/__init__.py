"""Devices: number formats, loss scaling, random generators, ranks, speeds and live memory. Knows no model."""
