"""The work of the commands: loads models, data and retrievers, trains, answers, evaluates, collects and exports."""
