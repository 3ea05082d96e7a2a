"""Checks that r3lite computes correctly on a device. `doctor` and the tests of a card run them."""
