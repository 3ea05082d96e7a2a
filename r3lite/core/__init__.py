"""The base layer: data that all rooms pass on, settings, files, errors. It imports the standard library only."""
