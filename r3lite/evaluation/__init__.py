"""Scores of finished episodes, with intervals, and the folder that they are written to. Knows no model."""
