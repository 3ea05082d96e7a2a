"""Scores of finished episodes, with intervals. Knows no model and no files."""
