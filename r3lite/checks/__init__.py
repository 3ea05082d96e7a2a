"""Checks of whether r3lite is right on a device: what `doctor` runs, and the tests of a card."""
