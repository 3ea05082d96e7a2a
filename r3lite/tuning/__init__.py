"""The parts of prompt optimisation: the requests to a critic, and the history of the prompts."""
