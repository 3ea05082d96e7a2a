"""What prompt optimisation is made of: what a critic is asked, and the history of the prompts."""
