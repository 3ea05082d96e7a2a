"""The base layer: the data that all layers share, settings, files, errors. It imports no packages but filelock."""
